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
    """Seconds by use, as rank 0 saw them; together they are all that passed."""

    start_up_seconds: float = 0.0  # to the first step: imports, data, the model, a checkpoint
    forward_backward_seconds: float = 0.0  # on the device
    update_seconds: float = 0.0  # the optimizer's part of steps, on the device
    data_wait_seconds: float = 0.0  # waiting for batches while the device had nothing to do
    save_stall_seconds: float = 0.0  # training stood still for a save
    validation_seconds: float = 0.0  # validations, tasks and text samples
    ending_seconds: float = 0.0  # after the last step: sample, export, wait for the mirror
    other_seconds: float = 0.0  # what is left: log lines, agreements between ranks, Python

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
    """The time since a run's first start."""

    sessions: int = 0  # how often it was started
    spent: TimeSpent = TimeSpent()  # of all sessions
    redone_seconds: float = 0.0  # computing of steps that a rewind threw away
    later_start_up_seconds: float = 0.0  # of all sessions but the first; part of `spent`
    away_seconds: float = 0.0  # between sessions, but not after the run had finished
    seconds_trained: float | None = None  # of all sessions, as the run itself counts them
    cost_usd: float | None = None  # of that time; None while no price is known

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


def _kept(made: list[tuple[int, int, float]], step: int) -> list[tuple[int, int, float]]:
    """Return what a rewind leaves of steps (after the first, up to the last, seconds)."""
    return [
        (first, min(last, step), seconds * (min(last, step) - first) / (last - first))
        for first, last, seconds in made
        if first < step
    ]


def run_time(records: Iterable[Mapping[str, Any]]) -> RunTime:
    """Add up the lines of a performance file, in their order.

    A `session` line opens a session at the step that it continues from: what was computed beyond
    that step was lost. A `time` line holds the seconds since the line before it.
    """
    sessions, spent, made = 0, TimeSpent(), list[tuple[int, int, float]]()
    redone = later_start_up = away = 0.0
    trained = cost = ended = None
    is_finished = False
    for record in records:
        kind, step = record.get("kind"), whole_number(record, "step")
        if kind not in ("session", "time") or step is None:
            continue
        uses, now = TimeSpent.from_record(record), unix_time(record.get("time"))
        if kind == "session":
            before, made = made, _kept(made, step)
            redone += sum(one[2] for one in before) - sum(one[2] for one in made)
            later_start_up += uses.start_up_seconds if sessions else 0.0
            if ended is not None and now is not None and not is_finished:
                away += max(0.0, now - uses.total_seconds - ended)
            sessions += 1
        else:
            first = whole_number(record, "first_step")
            if first is not None and first < step:
                made.append((first, step, uses.computing_seconds))
        ended, is_finished = now or ended, record.get(FINISHED) is True
        spent += uses
        known, paid = number(record, "seconds_trained"), number(record, "cost_usd")
        trained, cost = trained if known is None else known, cost if paid is None else paid
    return RunTime(sessions, spent, redone, later_start_up, away, trained, cost)


def read_run_time(run: Path) -> RunTime:
    """Read a run's performance file; zero where there is none."""
    return run_time(JsonLinesTail(run / PERFORMANCE_FILE).records())
