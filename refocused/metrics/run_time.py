"""Where each second of a run went, over all its sessions, from its performance file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from refocused.metrics.history import unix_time
from refocused.metrics.jsonl import JsonLinesTail, number, whole_number

PERFORMANCE_FILE = Path("logs") / "performance_metrics.jsonl"
FINISHED = "finished"  # true in the last line of a session that made the run's last step


@dataclasses.dataclass(frozen=True, slots=True)
class TimeSpent:
    """Seconds by use, as rank 0 saw them; together they are all that passed.

    Attributes:
        start_up_seconds: From the session's begin to its first step: imports, data, the model, a
            checkpoint.
        forward_backward_seconds: In the passes of steps, on the device.
        update_seconds: In the optimizer's part of steps, on the device.
        data_wait_seconds: Waiting for batches while the device had nothing to do.
        save_stall_seconds: In which training stood still for a save.
        validation_seconds: In validations, tasks and text samples.
        ending_seconds: After the last step: the sample, the export, the wait for the mirror.
        other_seconds: What is left: log lines, agreements between ranks, Python.
    """

    start_up_seconds: float = 0.0
    forward_backward_seconds: float = 0.0
    update_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    save_stall_seconds: float = 0.0
    validation_seconds: float = 0.0
    ending_seconds: float = 0.0
    other_seconds: float = 0.0

    def __add__(self, other: TimeSpent) -> TimeSpent:
        return TimeSpent(
            *(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__)
        )

    @property
    def total_seconds(self) -> float:
        """All of it."""
        return sum(self.as_record().values())

    @property
    def computing_seconds(self) -> float:
        """The steps themselves."""
        return self.forward_backward_seconds + self.update_seconds

    def as_record(self) -> dict[str, float]:
        """Return the fields for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TimeSpent:
        """Read a record's fields; what is not a number counts as 0."""
        return cls(*(number(record, name) or 0.0 for name in cls.__dataclass_fields__))


@dataclasses.dataclass(frozen=True, slots=True)
class RunTime:
    """The time since a run's first start.

    Attributes:
        sessions: How often it was started.
        spent: Of all sessions.
        redone_seconds: Computing of steps that a rewind threw away.
        later_start_up_seconds: Of all sessions but the first; part of `spent`.
        away_seconds: Between sessions, but not after the run had finished.
        seconds_trained: Of all sessions, as the run itself counts them.
        cost_usd: Of that time; None while no price is known.
    """

    sessions: int = 0
    spent: TimeSpent = TimeSpent()
    redone_seconds: float = 0.0
    later_start_up_seconds: float = 0.0
    away_seconds: float = 0.0
    seconds_trained: float | None = None
    cost_usd: float | None = None

    @property
    def elapsed_seconds(self) -> float:
        """Since the first start."""
        return self.spent.total_seconds + self.away_seconds

    @property
    def restart_seconds(self) -> float:
        """Cost of interruptions, without the steps that were made again."""
        return self.away_seconds + self.later_start_up_seconds

    @property
    def productive_seconds(self) -> float:
        """Computing of the steps that the run has kept."""
        return self.spent.computing_seconds - self.redone_seconds

    @property
    def goodput_fraction(self) -> float | None:
        """The productive share of the time since the first start; None before any."""
        elapsed = self.elapsed_seconds
        return self.productive_seconds / elapsed if elapsed > 0 else None

    def shares(self) -> dict[str, float]:
        """Return the share of each use in the time since the first start; together they are 1."""
        spent, elapsed = self.spent, self.elapsed_seconds or 1.0
        kept = self.productive_seconds / (spent.computing_seconds or 1.0)
        seconds = {
            "forward/backward": spent.forward_backward_seconds * kept,
            "update": spent.update_seconds * kept,
            "data": spent.data_wait_seconds,
            "saves": spent.save_stall_seconds,
            "validation": spent.validation_seconds,
            "start-up": spent.start_up_seconds - self.later_start_up_seconds,
            "restarts": self.restart_seconds,
            "redone": self.redone_seconds,
            "ending": spent.ending_seconds,
            "other": spent.other_seconds,
        }
        return {name: value / elapsed for name, value in seconds.items()}

    def as_line(self) -> str:
        """Return one line for a person: the goodput, and every use of a thousandth or more."""
        shares = " | ".join(
            f"{name} {share:.1%}" for name, share in self.shares().items() if share >= 0.001
        )
        return f"goodput {self.goodput_fraction or 0.0:.1%}: {shares}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Steps:
    """Computing of the steps after `first` up to `last`."""

    first: int
    last: int
    seconds: float

    def until(self, step: int) -> _Steps:
        """What a rewind to a step leaves of them, at an even pace."""
        last = max(self.first, min(self.last, step))
        share = (last - self.first) / (self.last - self.first)
        return _Steps(self.first, last, self.seconds * share)


def run_time(records: Iterable[Mapping[str, Any]]) -> RunTime:
    """Add up the lines of a performance file, in their order.

    A `session` line opens a session at the step that it continues from: what was computed beyond
    that step was lost. A `time` line holds the seconds since the line before it.
    """
    found, made = RunTime(), list[_Steps]()
    ended: float | None = None
    is_finished = False
    for record in records:
        kind, step = record.get("kind"), whole_number(record, "step")
        if kind not in ("session", "time") or step is None:
            continue
        spent, now = TimeSpent.from_record(record), unix_time(record.get("time"))
        if kind == "session":
            kept = [one.until(step) for one in made]
            lost = sum(one.seconds for one in made) - sum(one.seconds for one in kept)
            made = [one for one in kept if one.last > one.first]
            away = 0.0
            if ended is not None and now is not None and not is_finished:
                away = max(0.0, now - spent.total_seconds - ended)
            start_up = spent.start_up_seconds if found.sessions else 0.0
            found = dataclasses.replace(
                found,
                sessions=found.sessions + 1,
                redone_seconds=found.redone_seconds + lost,
                later_start_up_seconds=found.later_start_up_seconds + start_up,
                away_seconds=found.away_seconds + away,
            )
        else:
            first = whole_number(record, "first_step")
            if first is not None and first < step:
                made.append(_Steps(first, step, spent.computing_seconds))
        ended, is_finished = now or ended, record.get(FINISHED) is True
        trained, cost = number(record, "seconds_trained"), number(record, "cost_usd")
        found = dataclasses.replace(
            found,
            spent=found.spent + spent,
            seconds_trained=found.seconds_trained if trained is None else trained,
            cost_usd=found.cost_usd if cost is None else cost,
        )
    return found


def read_run_time(run: Path) -> RunTime:
    """Read a run's performance file; zero where there is none."""
    return run_time(JsonLinesTail(run / PERFORMANCE_FILE).records())
