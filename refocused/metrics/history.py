"""The metrics of a run's steps: written, read back, and kept at the end of each checkpoint."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from refocused.metrics.jsonl import as_record, number, text, whole_number
from refocused.metrics.rank_times import SlowestRank
from refocused.system.atomic_files import open_regular
from refocused.system.number_text import dollars, duration, known

logger = logging.getLogger(__name__)

HISTORY = "training_metrics.jsonl"  # in a checkpoint
METRICS_FILE = Path("logs") / HISTORY  # in a run's folder
EVENTS_FILE = Path("logs") / "events.jsonl"
MIRROR_FILE = Path("logs") / "mirror_metrics.jsonl"  # a line for each checkpoint mirrored
MOST_BYTES = 4 * 1024 * 1024  # some 10,000 lines
# The log line shows the wait for batches and the memory only from these values on.
LEAST_WAIT, LEAST_MEMORY = 0.01, 0.9


def end_of(file: Path) -> bytes | None:
    """Return the last whole lines of a file of JSON lines, or None; raise OSError if unreadable."""
    try:
        with file.open("rb") as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(0, size - MOST_BYTES - 1))
            content = lines.read()
    except FileNotFoundError:
        return None
    if size > MOST_BYTES:
        content = content.partition(b"\n")[2]
    return content[: content.rfind(b"\n") + 1] or None


def bring_back(kept: Path, file: Path, *, step: int) -> bool:
    """Fill an empty or missing metrics file from a checkpoint; return whether that was done.

    A disk that refuses it costs the history alone, and a warning.
    """
    if file.exists() and file.stat().st_size:
        return False
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as lines:  # a process that has it open appends behind
            lines.write(kept.read_bytes())
    except OSError as error:
        logger.warning("The losses before step %d are not in %s: %s.", step, file, error)
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """The measurements at one optimizer step, written and read back.

    None is unknown; a loss that is not finite is None once it is read back.
    """

    step: int  # optimizer steps made
    total_steps: int | None = None  # of the whole run
    tokens: int | None = None  # trained on since the run's first start
    epoch: int | None = None  # passes over the data begun before this one
    loss: float | None = None  # of this step, mean over accumulation and ranks
    loss_mean: float | None = None  # of this session's steps since the last line
    best_loss: float | None = None  # lowest validation loss so far
    learning_rate: float | None = None  # of this step's update
    gradient_norm: float | None = None  # of the whole gradient before clipping
    loss_scale: float | None = None  # fp16's
    skipped_steps: int | None = None  # updates that fp16 left out
    step_seconds: float | None = None  # mean since the last line, without validations and saves
    tokens_per_second: float | None = None  # of all ranks and all the time since the last line
    mfu_fraction: float | None = None  # share of the GPUs' dense peak that the model's FLOPs take
    data_wait_fraction: float | None = None  # of the time since the last line, waiting for batches
    gpu_memory_fraction: float | None = None  # peak share of the GPU's memory
    seconds_left: float | None = None  # with validations, saves and the final model
    seconds_trained: float | None = None  # of all sessions since the run's first start
    cost_usd: float | None = None  # of that time
    cost_left_usd: float | None = None  # of the time left
    stream_sequences: int | None = None  # of the stream up to here, with those of `data.skip`
    goodput_fraction: float | None = None  # of the time since the first start, in steps that count
    mfu_refused: bool = False  # the MFU is impossibly high, and therefore not shown
    slowest: SlowestRank | None = None  # the rank that works longest in a step
    time: float | None = None  # of the line, UTC; in Unix seconds once it is read back

    def as_record(self) -> dict[str, object]:
        """Return the fields under their own names, for JSON; the file adds the time."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "time"}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepMetrics | None:
        """Read a line; None: it has no step. Fields of another kind are unknown."""
        values: dict[str, Any] = {name: number(record, name) for name in _NUMBERS}
        values["time"] = unix_time(record.get("time"))
        values["mfu_refused"] = record.get("mfu_refused") is True
        with contextlib.suppress(pydantic.ValidationError):
            values["slowest"] = _SLOWEST.validate_python(record.get("slowest"))
        step = whole_number(record, "step")
        return None if step is None else cls(**{**values, "step": step})

    def as_line(self) -> str:
        """Return the log line of a step that was just measured."""
        slow, wait, memory = self.slowest, self.data_wait_fraction, self.gpu_memory_fraction
        total, done = self.total_steps, self.step / (self.total_steps or self.step or 1)
        lost = "; their steps and tokens count" if self.skipped_steps else ""
        parts = [
            known("step {:>7,}/{:,} {:.1%}", self.step, total, done),
            known("loss {:.4f}", self.loss)
            + ("" if self.loss_mean == self.loss else known(" mean {:.4f}", self.loss_mean))
            + known(" best val {:.4f}", self.best_loss),
            known("lr {:.2e}", self.learning_rate).replace("e-0", "e-"),
            known("gnorm {:.2f}", self.gradient_norm),
            known(f"scale {{:.0f}} ({{}} skipped{lost})", self.loss_scale, self.skipped_steps),
            known("{:.3g} s {:,.0f} tok/s", self.step_seconds, self.tokens_per_second),
            known("MFU {:.1%}", self.mfu_fraction) or "MFU ?" * self.mfu_refused,
            "" if (wait or 0.0) < LEAST_WAIT else known("data {:.1%}", wait),
            "" if (memory or 0.0) < LEAST_MEMORY else known("mem {:.0%}", memory),
        ]
        if slow is not None and slow.is_slow:
            parts.append(f"{slow.place} slow +{slow.excess_fraction:.0%} ({slow.phase})")
        money = [known("spent ${:,.2f}", self.cost_usd)]
        if self.seconds_left is not None:
            money.append(f"left {duration(self.seconds_left)}{dollars(self.cost_left_usd)}")
        return " | ".join(filter(None, [*parts, ", ".join(filter(None, money))]))


_NUMBERS = [field.name for field in dataclasses.fields(StepMetrics)][1:-3]
_SLOWEST = pydantic.TypeAdapter(SlowestRank)


@dataclasses.dataclass(frozen=True, slots=True)
class Validation:
    """A logged validation."""

    step: int
    loss: float | None  # None: it was not finite
    validation_set: str | None = None  # fingerprint of what it was made on
    bits_per_byte: float | None = None  # None: unknown, or not finite
    tokens: int | None = None  # trained on


def lowest(validations: Sequence[Validation]) -> Validation | None:
    """Return the validation of the lowest loss, the earliest of equal ones, if there is any.

    Only those of the set that was used last are compared, and not that before the first step, of
    which there is no checkpoint.
    """
    comparable = [
        (validation.loss, validation.step, validation)
        for validation in validations
        if validation.loss is not None
        and validation.step > 0
        and validation.validation_set == validations[-1].validation_set
    ]
    return min(comparable)[2] if comparable else None


class MetricsTimeline:
    """The records of the present branch: the later record of a step wins.

    A record of an earlier step than the last means that training went back. What lies beyond it
    belongs to another branch, even before the new one reaches that step.
    """

    def __init__(self, *, last: int | None = None) -> None:
        """Begin; only the `last` logged steps are kept, None: all."""
        self.steps = collections.deque[StepMetrics](maxlen=last)  # ascending, as the validations
        self.validations = collections.deque[Validation]()

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next line of the metrics file; others than steps and validations are skipped."""
        kind, metrics = record.get("kind"), StepMetrics.from_record(record)
        if metrics is None or kind not in ("step", "validation"):
            return
        step, is_step = metrics.step, kind == "step"
        for points, is_replaced in ((self.steps, is_step), (self.validations, not is_step)):
            while points and (points[-1].step > step or (is_replaced and points[-1].step == step)):
                points.pop()
        if is_step:
            self.steps.append(metrics)
        else:
            loss, measured_on = number(record, "validation_loss"), text(record, "validation_set")
            bits = number(record, "bits_per_byte")
            self.validations.append(Validation(step, loss, measured_on, bits, metrics.tokens))


def unix_time(value: object) -> float | None:
    """Return a time of day in ISO 8601 as Unix seconds; None: it is none."""
    try:
        moment = datetime.datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo else None


def read_history(file: Path) -> MetricsTimeline:
    """Read a metrics file, without torn lines; raise OSError if it cannot be read."""
    timeline = MetricsTimeline()
    with open_regular(file) as lines:
        content = lines.read()
    for line in content.splitlines():
        if (record := as_record(line)) is not None:
            timeline.add(record)
    return timeline


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where that overflows."""
    return math.inf if loss >= 700 else math.exp(loss)
