"""Settings of what a run leaves behind: checkpoints, validation, log lines, trackers, cost."""

from __future__ import annotations

from typing import Annotated

import pydantic

from refocused.config.section import (
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Section,
    TwoOrAll,
    matching,
)


class CheckpointConfig(Section):
    """When the state is saved, how much of it stays, where it is mirrored."""

    interval: CountOrZero = 1000
    """Steps between saves; 0: only the others, at the end and at stops."""
    keep: Count = pydantic.Field(default=5, ge=2)
    """Newest of these saves kept locally, besides the best step, the last one of the run, the
    newest of an interruption, and what the mirror lacks."""
    keep_epochs: bool = False
    """Also save at the end of every epoch of the data, and keep those."""
    save_best: bool = True
    """Also save after every validation that is the best so far."""
    mirror: str | None = None
    """`gs://bucket/prefix` or a folder for a copy of every checkpoint, one for all machines."""
    keep_remote: TwoOrAll = "all"
    """Newest rolling checkpoints kept in the mirror; `all`: nothing is removed there."""
    drain_minutes: NotNegative = pydantic.Field(default=30.0, le=100)
    """Longest wait for the mirror's queue at the end of a run."""
    max_failed_saves: Count = 3
    """Failed saves in a row after which the run stops."""
    in_background: bool = pydantic.Field(default=False, alias="async")
    """`async` in a run file: training waits only for a copy of the state in host memory (12 bytes a
    parameter, shared by the ranks and kept), not for the disk. A save at the end or for a stop is
    waited for."""
    export_final: bool = True
    """At the end, make `final_model/` of the last step, a folder that transformers load in
    bfloat16, and copy it to the mirror."""


Task = Annotated[
    str,
    matching(
        r"([a-z_]+=)?[^=]+\.jsonl",
        "a task is NAME=FILE.jsonl, as hellaswag=data/hellaswag_val.jsonl",
    ),
]


class EvaluationConfig(Section):
    """Validation, tasks and text samples inside the run; each also at the end."""

    interval: CountOrZero = 1000
    """Steps between validations; 0: only at the end."""
    windows: Count = 256
    """Windows of one validation over all ranks, always the same ones."""
    tasks: tuple[Task, ...] = ()
    """Each `NAME=FILE.jsonl` with a name of hellaswag, piqa, arc_easy, arc_challenge, lambada,
    multiple_choice; or a file whose fields show its form. Tasks and samples need the tokenizer's
    own files (`data.tokenizer`)."""
    task_interval: CountOrZero = 0
    """Steps between tasks; 0: only at the end."""
    task_items: Count = 1000
    """First items of each task; the ranks share them."""
    sample_prompt: Annotated[str, pydantic.Field(min_length=1)] | None = None
    """Beginning of the text samples; null: no samples."""
    sample_interval: CountOrZero = 0
    """Steps between samples; 0: one at the end, in the summary."""
    sample_tokens: Count = 200
    """Tokens of a text sample."""


def _not_too_often(seconds: float) -> float:
    if 0 < seconds < 0.5:
        raise ValueError("0, or at least 0.5 is wanted: more often costs and tells no more")
    return seconds


class LogConfig(Section):
    """Log lines and metrics."""

    interval: Count = 10
    """Steps between log lines; the loss is read from the device only then."""
    sample_seconds: Annotated[NotNegative, pydantic.AfterValidator(_not_too_often)] = 5.0
    """Seconds between readings of GPUs and machine, which alarms watch; 0: neither."""


class TrackingConfig(Section):
    """Optional trackers beside the run's own files. They never block or stop training."""

    wandb: (
        Annotated[
            str,
            matching(
                r"([^/\\#?%:\s]+/)?[^/\\#?%:\s]+",
                "PROJECT or ENTITY/PROJECT is wanted, without spaces and / \\ # ? % :",
            ),
        ]
        | None
    ) = None
    """Project at Weights & Biases, `PROJECT` or `ENTITY/PROJECT`. Without a key or the network all
    goes to `RUN/wandb`, for `wandb sync`."""
    tensorboard: bool = False
    """Write TensorBoard's files into `RUN/tensorboard`."""
    openmetrics: (
        Annotated[
            str,
            matching(
                r"(?s:.*)\.prom",
                "a file that ends in .prom is wanted: node exporter reads no other",
            ),
        ]
        | None
    ) = None
    """File `NAME.prom` for the newest figures, in the folder that node exporter reads."""
    histogram_interval: CountOrZero = 0
    """Steps between histograms of every weight and its gradient, for Weights & Biases and
    TensorBoard; 0: none. Each gathers the whole model once in float32, tensor by tensor."""

    @pydantic.model_validator(mode="after")
    def _drawn_when_asked(self) -> TrackingConfig:
        if self.histogram_interval and self.wandb is None and not self.tensorboard:
            raise ValueError("histogram_interval needs wandb or tensorboard, which draw histograms")
        return self


class CostConfig(Section):
    """What the machine costs; None: unknown, or no limit."""

    per_hour_usd: Positive | None = None
    """Price of the whole machine, all GPUs of this run together; null: unknown."""
    budget_usd: Positive | None = None
    """What the run may cost over all its sessions: then it is saved and stops with exit code 4."""
    credit_usd: Positive | None = None
    """Credit at the provider when the run first began; an alarm warns when it does not last."""

    @pydantic.model_validator(mode="after")
    def _priced_when_limited(self) -> CostConfig:
        for name in ("budget_usd", "credit_usd"):
            if getattr(self, name) is not None and self.per_hour_usd is None:
                raise ValueError(f"{name} needs per_hour_usd, the price of the machine")
        return self
