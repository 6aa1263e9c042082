"""Start the sampler's process with its settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pydantic

from refocused.config.outputs import CostConfig, LogConfig
from refocused.monitor.sampler.sampler_process import SamplerError, start_sampler
from refocused.system.processes import ProcessIdentity, this_process
from refocused.system.world import World


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


def start_sampling(
    folder: Path,
    world: World,
    *,
    report: Callable[[str, str], None],
    log: LogConfig,
    cost: CostConfig,
) -> None:
    """Start the sampler of this machine, if the run has any; every rank may call.

    One that cannot be started is told and missed: the run goes on.

    Args:
        folder: The run's.
        world: The ranks.
        report: Takes the kind of an event and its text.
        log: How often to sample.
        cost: What alarms compare the run's cost with.
    """
    if not log.sample_seconds or not world.is_local_rank_0:
        return
    settings = sampler_settings(folder, world, log=log, cost=cost, environment=os.environ)
    try:
        start_sampler(settings)
    except SamplerError as error:
        report("sampler_failed", str(error))


def sampler_settings(
    folder: Path, world: World, *, log: LogConfig, cost: CostConfig, environment: Mapping[str, str]
) -> SamplerSettings:
    """Return what the sampler of this rank's machine is told."""
    return SamplerSettings(
        run=folder,
        training=this_process(),
        interval_seconds=log.sample_seconds,
        node=world.node,
        ranks=world.local_world_size if world.device_kind == "cuda" else 0,
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        cuda_order=environment.get("CUDA_DEVICE_ORDER"),
        per_hour_usd=cost.per_hour_usd,
        budget_usd=cost.budget_usd,
        credit_usd=cost.credit_usd,
    )
