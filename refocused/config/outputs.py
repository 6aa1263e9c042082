"""Settings of a run's outputs: checkpoints, validation, log lines, trackers, cost."""

import re
from typing import Annotated, Self

import pydantic

from refocused.config.section import (
    Count,
    CountOrZero,
    Flag,
    NotNegative,
    Number,
    PathText,
    Positive,
    Section,
    TwoOrAll,
    Whole,
    matching,
    setting,
)


class CheckpointConfig(Section):
    """When checkpoints are saved, how many are kept, and where they are mirrored."""

    interval: CountOrZero = setting(1000, "500")
    """Steps between saves; 0: save only at the end, at stops and where other settings say so."""
    keep: Whole = setting(5, "10", ge=2)
    """Newest of these checkpoints to keep locally, besides the best, the last of the run, the
    newest of an interruption, and those not in the mirror."""
    keep_epochs: Flag = False
    """Also save at the end of every epoch, and keep these checkpoints."""
    save_best: Flag = True
    """Also save after every validation with a new best loss."""
    mirror: PathText | None = setting(None, "gs://my-bucket/checkpoints")
    """Bucket prefix (as in `data.source`) or shared folder, for a copy of each checkpoint."""
    keep_remote: TwoOrAll = setting("all", "20")
    """Newest rolling checkpoints to keep in the mirror; `all`: remove none there."""
    drain_minutes: NotNegative = setting(30.0, "60", le=100)
    """Longest wait for the mirror's queue at the end of a run, in minutes."""
    max_failed_saves: Count = setting(3, "5")
    """Failed saves in a row after which the run stops."""
    in_background: Flag = pydantic.Field(default=False, alias="async")
    """Save in the background (`async` in a run file): training waits only for a copy of the state
    in host memory (12 bytes a parameter over all ranks). Saves at the end and at stops block."""
    export_final: Flag = True
    """At the end, export the last checkpoint to `final_model/`, which transformers load in
    bfloat16, and copy it to the mirror."""


LEAST_TEMPERATURE = 0.01  # with less, quotients of logits may overflow in float16

Task = Annotated[
    str,
    matching(
        r"([a-z_]+=)?[^=]+\.jsonl|core=[^=]+",
        "a task is NAME=FILE.jsonl, as hellaswag=data/hellaswag_val.jsonl, or core=FOLDER",
    ),
]


class EvaluationConfig(Section):
    """Validation, tasks and text samples during training; each also at the end."""

    at_start: Flag = False
    """Also validate, and score the tasks, before the first step: the baseline of untrained weights
    or of `model.start_from`. It never counts as the best."""
    interval: CountOrZero = setting(1000, "500")
    """Steps between validations; 0: only at the end."""
    sequences: Count = setting(256, "512")
    """Sequences of one validation over all ranks, the same every time."""
    tasks: tuple[Task, ...] = setting((), "[hellaswag=data/hellaswag_val.jsonl]")
    """Each `NAME=FILE.jsonl`; NAME is hellaswag, piqa, arc_easy, arc_challenge, lambada or
    multiple_choice. Or `FILE.jsonl`, whose form follows from its fields. Or `core=FOLDER`, DCLM's
    bundle of 22 tasks. Tasks and samples need the tokenizer's files (`data.tokenizer`)."""
    task_interval: CountOrZero = setting(0, "5000")
    """Steps between tasks; 0: only at the end."""
    task_items: Count = setting(1000, "500")
    """Number of items of each task, the first ones (of CORE: drawn from each of the 22), spread
    over the ranks."""
    sample_prompt: Annotated[str, pydantic.Field(min_length=1)] | None = setting(
        None, "Once upon a time"
    )
    """Prompt of the text samples; null: no samples."""
    further_prompts: tuple[Annotated[str, pydantic.Field(min_length=1)], ...] = setting(
        (), "[In the beginning, The reason is]"
    )
    """Prompts besides `sample_prompt`, each of which is continued, too."""
    sample_interval: CountOrZero = setting(0, "2000")
    """Steps between text samples; 0: one with untrained weights and one at the end."""
    sample_tokens: Count = setting(200, "100")
    """Tokens of a text sample."""
    sample_temperature: Number = setting(0.8, "0.3", ge=LEAST_TEMPERATURE)
    """Divides the logits of a text sample: the lower, the likelier the tokens drawn."""

    @property
    def sample_prompts(self) -> tuple[str, ...]:
        """All prompts of a text sample; empty: there are no samples."""
        first = self.sample_prompt
        return () if first is None else (first, *self.further_prompts)


HIDDEN = "(hidden)"  # in place of the command of `run.on_end`, in all that a run writes


def without_secrets(text: str) -> str:
    """Hide the command of `run.on_end`, and all of a web address but its host."""
    text = re.sub(r"(?s)(\bon_end(?: = |\W)).*", rf"\1{HIDDEN}", text)
    return re.sub(r"(https?://)(?:[^/@\s]*@)?([^/?#\s'\"]+)[^\s'\"]*", r"\1\2/...", text)


def _address_or_command(text: str) -> str:
    if not text.strip() or re.match(r"(?!https?://.)\S*://", text):
        raise ValueError("expected an https:// address or a shell command")
    return text


def _not_too_often(seconds: float) -> float:
    if 0 < seconds < 0.5:
        raise ValueError("expected 0, or at least 0.5: more often costs time and adds nothing")
    return seconds


class LogConfig(Section):
    """Log lines and metrics."""

    interval: Count = setting(10, "50")
    """Steps between log lines. Only then is the loss read from the device."""
    sample_seconds: Annotated[NotNegative, pydantic.AfterValidator(_not_too_often)] = setting(
        5.0, "10"
    )
    """Seconds between readings of GPUs and machine, which the alarms use; 0: no readings."""
    on_alarm: Annotated[str, pydantic.AfterValidator(_address_or_command)] | None = setting(
        None, "https://hooks.example.com/alarms"
    )
    """Where critical alarms are sent when they are raised and cleared: an `https://` address (JSON
    by POST), or a shell command, as `./notify.sh` (the same JSON on its standard input); null:
    nowhere. Logs, `run.yaml` and trackers show only the host of an address."""

    @pydantic.field_serializer("on_alarm")
    def _hide_secrets(self, text: str | None) -> str | None:
        return None if text is None else without_secrets(text)


class TrackingConfig(Section):
    """Optional trackers beside the run's own files. They never block or stop training."""

    wandb: (
        Annotated[
            str,
            matching(
                r"([^/\\#?%:\s]+/)?[^/\\#?%:\s]+",
                "expected PROJECT or ENTITY/PROJECT, without spaces and / \\ # ? % :",
            ),
        ]
        | None
    ) = setting(None, "my-team/refocused")
    """Project at Weights & Biases, `PROJECT` or `ENTITY/PROJECT`. Without a key or network, the run
    writes to `RUN/wandb` for `wandb sync`."""
    tensorboard: Flag = False
    """Write TensorBoard files to `RUN/tensorboard`."""
    openmetrics: (
        Annotated[
            PathText,
            matching(
                r"(?s:.*)\.prom", "expected a file that ends in .prom: node exporter reads no other"
            ),
        ]
        | None
    ) = setting(None, "/var/lib/node_exporter/refocused.prom")
    """File `NAME.prom` for the newest metrics, in the folder that node exporter reads."""
    histogram_interval: CountOrZero = setting(0, "1000")
    """Steps between histograms of weights and gradients, for Weights & Biases and TensorBoard; 0:
    none. Each gathers the model once in float32, tensor by tensor."""

    @pydantic.model_validator(mode="after")
    def _drawn_when_asked(self) -> Self:
        if self.histogram_interval and self.wandb is None and not self.tensorboard:
            raise ValueError("histogram_interval needs wandb or tensorboard")
        return self


class CostConfig(Section):
    """The price of the machine, and limits of what a run may cost."""

    per_hour_usd: Positive | None = setting(None, "24")
    """Price of all machines of the run together, in USD an hour; null: unknown."""
    budget_usd: Positive | None = setting(None, "400")
    """Limit of the cost over all sessions; then the run saves and stops with exit code 4."""
    credit_usd: Positive | None = setting(None, "500")
    """Credit at the provider when the run first began; an alarm warns if it will not last."""

    @pydantic.model_validator(mode="after")
    def _priced_when_limited(self) -> Self:
        for name in ("budget_usd", "credit_usd"):
            if getattr(self, name) is not None and self.per_hour_usd is None:
                raise ValueError(f"{name} needs per_hour_usd, the price of the machine")
        return self
