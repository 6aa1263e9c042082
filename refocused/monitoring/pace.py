"""How fast a run is, and what it has left to do, from measured times (pure)."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from refocused.monitoring.performance import TimeSpent
from refocused.monitoring.tail import number, text, whole_number

WARM_UP_STEPS = 10  # of each session: they compile, allocate and fill caches
RECENT = 50  # measurements that a median is of


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """Medians of what was measured last; None: nothing was.

    Attributes:
        step_seconds: Of a step, with its share of log lines, without validations and saves.
        validation_seconds: Of a validation.
        save_seconds: In which training stood still for a save.
        tasks_seconds: Of putting all tasks once.
        sample_seconds: Of a sample.
    """

    step_seconds: float | None = None
    validation_seconds: float | None = None
    save_seconds: float | None = None
    tasks_seconds: float | None = None
    sample_seconds: float | None = None

    def seconds_left(
        self, *, steps: int, validations: int, saves: int, tasks: int = 0, samples: int = 0
    ) -> float | None:
        """Return the time that so many of each will take; None before the first step.

        What was not measured yet counts as nothing.
        """
        if self.step_seconds is None:
            return None
        others = (
            (validations, self.validation_seconds),
            (saves, self.save_seconds),
            (tasks, self.tasks_seconds),
            (samples, self.sample_seconds),
        )
        return steps * self.step_seconds + sum(count * (each or 0.0) for count, each in others)


def median(values: Sequence[float]) -> float | None:
    """Return the median of the last values; None of none."""
    return statistics.median(list(values)[-RECENT:]) if values else None


def measured_pace(records: Iterable[Mapping[str, Any]]) -> Pace:
    """Return the pace that a run's own records tell of.

    Steps are of the newest session alone, which may have other GPUs than those before it; its
    first steps count only while it has no others.

    Args:
        records: The lines of `performance_metrics.jsonl` in their order, and those of
            `training_metrics.jsonl` and the samples of `events.jsonl`, before or behind them.
    """
    warm_up, steps, earlier = list[float](), list[float](), list[float]()
    others: dict[str, list[float]] = {"validation": [], "save": [], "tasks": [], "sample": []}
    began = 0
    for record in records:
        kind, step = text(record, "kind"), whole_number(record, "step")
        if step is None:
            continue
        if kind == "session":
            began, earlier = step, steps or warm_up or earlier
            warm_up, steps = [], []
        elif kind == "time":
            first = whole_number(record, "first_step")
            if first is not None and first < step:
                each = _step_seconds(TimeSpent.from_record(record), steps=step - first)
                (warm_up if first < began + WARM_UP_STEPS else steps).append(each)
        elif kind in others:
            taken = number(record, "save_stall_seconds" if kind == "save" else "seconds")
            others[kind] += [] if taken is None else [taken]
    return Pace(
        step_seconds=median(steps or warm_up or earlier),
        validation_seconds=median(others["validation"]),
        save_seconds=median(others["save"]),
        tasks_seconds=median(others["tasks"]),
        sample_seconds=median(others["sample"]),
    )


def _step_seconds(spent: TimeSpent, *, steps: int) -> float:
    return (spent.computing_seconds + spent.data_wait_seconds + spent.other_seconds) / steps
