"""The metrics of a run's present branch, and the end of them that each checkpoint keeps."""

import contextlib
import dataclasses
import datetime
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pydantic

from refocused.metrics.jsonl import as_record, number, whole_number
from refocused.metrics.rank_times import SlowestRank
from refocused.system.atomic_files import open_regular

logger = logging.getLogger(__name__)

HISTORY = "training_metrics.jsonl"  # in a checkpoint
METRICS_FILE = Path("logs") / HISTORY  # in a run's folder
EVENTS_FILE = Path("logs") / "events.jsonl"
MIRROR_FILE = Path("logs") / "mirror_metrics.jsonl"  # a line for each checkpoint mirrored
MOST_BYTES = 4 * 1024 * 1024  # some 10,000 lines


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
class StepPoint:
    """One logged step, with the names of `StepMetrics`; `time` is in Unix seconds.

    A validation has a step, a loss and its set alone. A loss of None was not finite.
    """

    step: int
    time: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu_fraction: float | None = None
    data_wait_fraction: float | None = None
    gpu_memory_fraction: float | None = None
    seconds_left: float | None = None
    seconds_trained: float | None = None
    cost_usd: float | None = None
    cost_left_usd: float | None = None
    tokens: float | None = None  # trained on since the run's first start
    slowest: SlowestRank | None = None  # the rank that works longest
    validation_set: str | None = None  # fingerprint of what a validation was made on


_SLOWEST = pydantic.TypeAdapter(SlowestRank)
_MEASURED = tuple(field.name for field in dataclasses.fields(StepPoint))[2:-2]


def lowest(points: Iterable[StepPoint]) -> StepPoint | None:
    """Return the point of the lowest loss, the earliest of equal ones; None: there is none.

    Only validations of the set that was used last are compared.
    """
    points = list(points)
    last = points[-1].validation_set if points else None
    known = (one for one in points if one.loss is not None and one.validation_set == last)
    return min(known, key=lambda point: point.loss or 0.0, default=None)


class MetricsTimeline:
    """The records of the present branch: the later record of a step wins.

    A record of an earlier step than the last means that training went back. What lies beyond it
    belongs to another branch, even before the new one reaches that step.
    """

    def __init__(self, *, last: int | None = None) -> None:
        """Begin; only the `last` logged steps are kept, None: all."""
        self._last = last
        self._steps: dict[int, StepPoint] = {}
        self._validations: dict[int, StepPoint] = {}
        self._newest = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next line of the metrics file; others than steps and validations are skipped."""
        kind, step = record.get("kind"), whole_number(record, "step")
        if kind not in ("step", "validation") or step is None:
            return
        if step < self._newest:
            for found in (self._steps, self._validations):
                for left in [other for other in found if other > step]:
                    del found[left]
        self._newest = step
        if kind == "validation":
            self._validations[step] = StepPoint(
                step,
                loss=number(record, "validation_loss"),
                validation_set=record.get("validation_set"),
            )
            return
        self._steps.pop(step, None)  # so that the order stays that of the steps
        measured: dict[str, Any] = {name: number(record, name) for name in _MEASURED}
        with contextlib.suppress(pydantic.ValidationError):
            measured["slowest"] = _SLOWEST.validate_python(record.get("slowest"))
        self._steps[step] = StepPoint(step, unix_time(record.get("time")), **measured)
        if self._last is not None and len(self._steps) > self._last:
            del self._steps[next(iter(self._steps))]

    @property
    def steps(self) -> list[StepPoint]:
        """The logged steps, ascending."""
        return list(self._steps.values())

    @property
    def validations(self) -> list[StepPoint]:
        """The validations, ascending by step."""
        return sorted(self._validations.values(), key=lambda point: point.step)


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
