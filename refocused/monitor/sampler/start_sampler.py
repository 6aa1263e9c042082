"""What the sampler's process is told, and which files of the run are its own."""

from __future__ import annotations

from pathlib import Path

import pydantic

from refocused.system.processes import ProcessIdentity


class SamplerSettings(pydantic.BaseModel):
    """Everything that the sampler needs to know.

    Attributes:
        run: The run's folder.
        training: The machine's first rank; when it is gone, the sampler ends. None: nothing of a
            run is watched, and the sampler goes on until it is interrupted.
        interval_seconds: Time between two samples.
        node: This machine's number among those of the run; the first also watches the run itself.
        ranks: Of the run, on this machine.
        visible_devices: CUDA_VISIBLE_DEVICES of the ranks; None: it is not set.
        cuda_order: CUDA_DEVICE_ORDER of the ranks; None: it is not set.
        per_hour_usd: Price of the machines; None: unknown.
        budget_usd: What the run may cost; None: no limit.
        credit_usd: What was on the provider's account; None: unknown.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    run: Path
    training: ProcessIdentity | None
    interval_seconds: float = pydantic.Field(default=5.0, gt=0)
    node: int = 0
    ranks: int = 1
    visible_devices: str | None = None
    cuda_order: str | None = None
    per_hour_usd: float | None = None
    budget_usd: float | None = None
    credit_usd: float | None = None

    @pydantic.field_validator("run")
    @classmethod
    def _anywhere(cls, path: Path) -> Path:
        return path.expanduser().absolute()

    @property
    def training_alive(self) -> bool:
        """Whether the machine's first rank runs."""
        return self.training is not None and self.training.alive

    @property
    def samples(self) -> Path:
        """Where the samples go."""
        return self._log("gpu_metrics", ".jsonl")

    @property
    def events(self) -> Path:
        """Where alarms go; the first machine's beside what the trainer tells."""
        return self._log("events", ".jsonl")

    @property
    def log(self) -> Path:
        """Where the sampler's process says what it has to say."""
        return self._log("sampler", ".log")

    @property
    def alarm_log(self) -> Path:
        """The log that a person reads: alarms are said there too."""
        return self.run / "logs" / "training.log" if self.node == 0 else self.log

    @property
    def lock(self) -> Path:
        """Held by the machine's one sampler of the run."""
        return self.run / f"sampler-{self.node}.lock"

    def _log(self, name: str, suffix: str) -> Path:
        node = "" if self.node == 0 else f"-node-{self.node}"
        return self.run / "logs" / f"{name}{node}{suffix}"
