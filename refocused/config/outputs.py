"""Settings of what a run leaves behind: checkpoints, validation, log lines, trackers, cost."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import pydantic

from refocused.config.section import Count, CountOrZero, NotNegative, Positive, Section


def _all_or_number(value: object) -> Literal["all"] | int:
    if value == "all":
        return "all"
    try:
        return _TWO_OR_MORE.validate_python(value)
    except pydantic.ValidationError:
        raise ValueError("`all`, or a whole number from 2, is wanted") from None


_TWO_OR_MORE: pydantic.TypeAdapter[int] = pydantic.TypeAdapter(
    Annotated[Count, pydantic.Field(ge=2)]
)
AllOrNumber = Annotated[Literal["all"] | int, pydantic.PlainValidator(_all_or_number)]


class CheckpointConfig(Section):
    """When the state is saved, how much of it stays, where it is mirrored.

    Attributes:
        interval: Steps between saves; 0: only the other saves, at the end and when stopped.
        keep: Newest of these saves kept locally, at least 2; beside them stay the best step, the
            last one of the run, the newest of an interruption, and what the mirror lacks.
        keep_epochs: Save at the end of every epoch of the data too, and keep those steps.
        save_best: Save after every validation that is the best so far too; the best one stays
            until another is better.
        mirror: `gs://bucket/prefix` or a folder, one for all machines, that gets a copy of every
            step directory; None: no copy.
        keep_remote: As `keep`, in the mirror; `all`: nothing is removed there.
        drain_minutes: Longest wait at the end for the mirror to finish its queue; the other ranks
            wait too, and give up after two hours.
        max_failed_saves: Failed saves in a row that stop the run.
        in_background: Written as `async`: training waits only for a copy of the state in host
            memory, which is written while it goes on. The copy's memory is kept (12 bytes a
            parameter, shared by the ranks). A save at the end or for a stop is waited for.
        export_final: At the end of a run, make `final_model/` of its last step, a folder that
            transformers load in bfloat16, and copy it to the mirror.
    """

    interval: CountOrZero = 1000
    keep: Count = pydantic.Field(default=5, ge=2)
    keep_epochs: bool = False
    save_best: bool = True
    mirror: str | None = None
    keep_remote: AllOrNumber = "all"
    drain_minutes: NotNegative = pydantic.Field(default=30.0, le=100)
    max_failed_saves: Count = 3
    in_background: bool = pydantic.Field(default=False, alias="async")
    export_final: bool = True


def _task(value: str) -> str:
    if not re.fullmatch(r"([a-z_]+=)?[^=]+\.jsonl", value):
        raise ValueError("a task is NAME=FILE.jsonl, as hellaswag=data/hellaswag_val.jsonl")
    return value


class EvaluationConfig(Section):
    """Validation, tasks and samples inside the run; each also at the end.

    Attributes:
        interval: Steps between validations; 0 validates only at the end.
        windows: Windows of one validation over all ranks, always the same ones.
        tasks: Questions put to the model, each `NAME=FILE.jsonl` with a name of hellaswag, piqa,
            arc_easy, arc_challenge, lambada, multiple_choice; or a file whose fields tell its form.
            They need the tokenizer's own files (`data.tokenizer`), as samples do.
        task_interval: Steps between tasks; 0 puts them only at the end.
        task_items: First items of each task that are put; the ranks share them.
        sample_prompt: Text that the model continues; None: no sample.
        sample_interval: Steps between samples; 0 writes one only at the end, in the summary.
        sample_tokens: Tokens of a sample.
    """

    interval: CountOrZero = 1000
    windows: Count = 256
    tasks: tuple[Annotated[str, pydantic.AfterValidator(_task)], ...] = ()
    task_interval: CountOrZero = 0
    task_items: Count = 1000
    sample_prompt: Annotated[str, pydantic.Field(min_length=1)] | None = None
    sample_interval: CountOrZero = 0
    sample_tokens: Count = 200


class LogConfig(Section):
    """Log lines and metrics.

    Attributes:
        interval: Steps between log lines; the loss is read from the device only then.
        sample_seconds: Seconds between two samples of GPUs and machine (`gpu_metrics.jsonl`), in
            which alarms are looked for too; 0: neither.
    """

    interval: Count = 10
    sample_seconds: NotNegative = 5.0

    @pydantic.field_validator("sample_seconds")
    @classmethod
    def _not_too_often(cls, seconds: float) -> float:
        if 0 < seconds < 0.5:
            raise ValueError("0, or at least 0.5 is wanted: more often costs and tells no more")
        return seconds


def _wandb_project(value: str) -> str:
    if not re.fullmatch(r"([^/\\#?%:\s]+/)?[^/\\#?%:\s]+", value):
        raise ValueError("PROJECT or ENTITY/PROJECT is wanted, without spaces and / \\ # ? % :")
    return value


def _prom_file(value: str) -> str:
    if not value.endswith(".prom"):
        raise ValueError("a file that ends in .prom is wanted: node exporter reads no other")
    return value


class TrackingConfig(Section):
    """Who is told of the run, besides its own files, which tell everything.

    None of them stops training or slows it down; what is wrong with one is said.

    Attributes:
        wandb: Project at Weights & Biases, `PROJECT` or `ENTITY/PROJECT`; None: it is not told.
            Without a key or the network all goes to `RUN/wandb`, for `wandb sync`.
        tensorboard: Write TensorBoard's files into `RUN/tensorboard`.
        openmetrics: A file `NAME.prom`, in the folder that Prometheus' node exporter reads, which
            holds the newest figures; None: there is none.
        histogram_interval: Steps between histograms of every weight and its gradient, for Weights
            & Biases and TensorBoard; 0: none. Each gathers the whole model once in float32,
            tensor by tensor.
    """

    wandb: Annotated[str, pydantic.AfterValidator(_wandb_project)] | None = None
    tensorboard: bool = False
    openmetrics: Annotated[str, pydantic.AfterValidator(_prom_file)] | None = None
    histogram_interval: CountOrZero = 0

    @pydantic.model_validator(mode="after")
    def _drawn_when_asked(self) -> TrackingConfig:
        if self.histogram_interval and self.wandb is None and not self.tensorboard:
            raise ValueError("histogram_interval needs wandb or tensorboard, which draw histograms")
        return self


class CostConfig(Section):
    """What the machine costs.

    Attributes:
        per_hour_usd: Price of the whole machine (all GPUs of this run) an hour; None: unknown.
        budget_usd: What the run may cost over all its sessions: then it is saved and stops, with
            exit code 4; None: no limit. Needs `per_hour_usd`.
        credit_usd: What was on the provider's account when the run first began: an alarm tells
            when it does not last; None: unknown. Needs `per_hour_usd`.
    """

    per_hour_usd: Positive | None = None
    budget_usd: Positive | None = None
    credit_usd: Positive | None = None

    @pydantic.model_validator(mode="after")
    def _priced_when_limited(self) -> CostConfig:
        for name in ("budget_usd", "credit_usd"):
            if getattr(self, name) is not None and self.per_hour_usd is None:
                raise ValueError(f"{name} needs per_hour_usd, the price of the machine")
        return self
