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

    interval: CountOrZero = 1000  # steps between saves; 0: only the others, at the end and at stops
    # Newest of these saves kept locally, besides the best step, the last one of the run, the newest
    # of an interruption, and what the mirror lacks.
    keep: Count = pydantic.Field(default=5, ge=2)
    keep_epochs: bool = False  # also save at the end of every epoch of the data, and keep those
    save_best: bool = True  # also save after every validation that is the best so far
    # `gs://bucket/prefix` or a folder, one for all machines, for a copy of every step directory.
    mirror: str | None = None
    keep_remote: TwoOrAll = "all"  # as `keep`, in the mirror; `all`: nothing is removed there
    # Longest wait at the end for the mirror's queue; the other ranks wait for two hours at most.
    drain_minutes: NotNegative = pydantic.Field(default=30.0, le=100)
    max_failed_saves: Count = 3  # in a row; then the run stops
    # `async` in a run file: training waits only for a copy of the state in host memory (12 bytes a
    # parameter, shared by the ranks and kept), not for the disk. A save at the end or for a stop is
    # waited for.
    in_background: bool = pydantic.Field(default=False, alias="async")
    # At the end, make `final_model/` of the last step, a folder that transformers load in bfloat16,
    # and copy it to the mirror.
    export_final: bool = True


Task = Annotated[
    str,
    matching(
        r"([a-z_]+=)?[^=]+\.jsonl",
        "a task is NAME=FILE.jsonl, as hellaswag=data/hellaswag_val.jsonl",
    ),
]


class EvaluationConfig(Section):
    """Validation, tasks and text samples inside the run; each also at the end."""

    interval: CountOrZero = 1000  # steps between validations; 0: only at the end
    windows: Count = 256  # of one validation over all ranks, always the same
    # Each `NAME=FILE.jsonl` with a name of hellaswag, piqa, arc_easy, arc_challenge, lambada,
    # multiple_choice; or a file whose fields show its form. Tasks and samples need the tokenizer's
    # own files (`data.tokenizer`).
    tasks: tuple[Task, ...] = ()
    task_interval: CountOrZero = 0  # steps between tasks; 0: only at the end
    task_items: Count = 1000  # first items of each task; the ranks share them
    sample_prompt: Annotated[str, pydantic.Field(min_length=1)] | None = None  # None: no sample
    sample_interval: CountOrZero = 0  # steps between samples; 0: one at the end, in the summary
    sample_tokens: Count = 200


def _not_too_often(seconds: float) -> float:
    if 0 < seconds < 0.5:
        raise ValueError("0, or at least 0.5 is wanted: more often costs and tells no more")
    return seconds


class LogConfig(Section):
    """Log lines and metrics."""

    interval: Count = 10  # steps between log lines; the loss is read from the device only then
    # Between readings of GPUs and machine (`gpu_metrics.jsonl`), which alarms watch; 0: neither.
    sample_seconds: Annotated[NotNegative, pydantic.AfterValidator(_not_too_often)] = 5.0


class TrackingConfig(Section):
    """Optional trackers beside the run's own files. They never block or stop training."""

    # Project at Weights & Biases, `PROJECT` or `ENTITY/PROJECT`. Without a key or the network all
    # goes to `RUN/wandb`, for `wandb sync`.
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
    tensorboard: bool = False  # write TensorBoard's files into `RUN/tensorboard`
    # A file `NAME.prom` of the newest figures, in the folder that Prometheus' node exporter reads.
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
    # Steps between histograms of every weight and its gradient, for Weights & Biases and
    # TensorBoard; 0: none. Each gathers the whole model once in float32, tensor by tensor.
    histogram_interval: CountOrZero = 0

    @pydantic.model_validator(mode="after")
    def _drawn_when_asked(self) -> TrackingConfig:
        if self.histogram_interval and self.wandb is None and not self.tensorboard:
            raise ValueError("histogram_interval needs wandb or tensorboard, which draw histograms")
        return self


class CostConfig(Section):
    """What the machine costs; None: unknown, or no limit."""

    per_hour_usd: Positive | None = None  # of the whole machine: all GPUs of this run
    # What the run may cost over all its sessions: then it is saved and stops with exit code 4.
    budget_usd: Positive | None = None
    # On the provider's account when the run first began: an alarm warns when it does not last.
    credit_usd: Positive | None = None

    @pydantic.model_validator(mode="after")
    def _priced_when_limited(self) -> CostConfig:
        for name in ("budget_usd", "credit_usd"):
            if getattr(self, name) is not None and self.per_hour_usd is None:
                raise ValueError(f"{name} needs per_hour_usd, the price of the machine")
        return self
