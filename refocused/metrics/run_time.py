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
    """Seconds by use, measured on rank 0; they add up to the elapsed time."""

    start_up_seconds: float = 0.0  # to the first step: imports, data, the model, a checkpoint
    forward_backward_seconds: float = 0.0  # on the device
    update_seconds: float = 0.0  # the optimizer's part of steps, on the device
    data_wait_seconds: float = 0.0  # waiting for batches while the device was idle
    save_stall_seconds: float = 0.0  # training was blocked by a save
    validation_seconds: float = 0.0  # validations, tasks and text samples
    ending_seconds: float = 0.0  # after the last step: sample, export, wait for the mirror
    other_seconds: float = 0.0  # the rest: logging, synchronization of ranks, Python

    def __add__(self, other: TimeSpent) -> TimeSpent:
        return TimeSpent(
            *(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__)
        )

    @property
    def total_seconds(self) -> float:
        """Sum of all uses."""
        return sum(self.as_record().values())

    @property
    def computing_seconds(self) -> float:
        """Forward, backward and update."""
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

    sessions: int = 0  # number of starts
    spent: TimeSpent = TimeSpent()  # of all sessions
    redone_seconds: float = 0.0  # computing steps that a rewind discarded
    later_start_up_seconds: float = 0.0  # of all sessions but the first; part of `spent`
    away_seconds: float = 0.0  # between sessions, but not after the run had finished
    seconds_trained: float | None = None  # of all sessions, as recorded by the run
    cost_usd: float | None = None  # of that time; None while no price is known

    @property
    def elapsed_seconds(self) -> float:
        """Since the first start."""
        return self.spent.total_seconds + self.away_seconds

    @property
    def restart_seconds(self) -> float:
        """Cost of interruptions, without recomputed steps."""
        return self.away_seconds + self.later_start_up_seconds

    @property
    def productive_seconds(self) -> float:
        """Computing steps that were kept."""
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
        """Return the goodput and every use of at least 0.1 % as a log line."""
        shares = " | ".join(
            f"{name} {share:.1%}" for name, share in self.shares().items() if share >= 0.001
        )
        return f"goodput {self.goodput_fraction or 0.0:.1%}: {shares}"


def _kept(made: list[tuple[int, int, float]], step: int) -> list[tuple[int, int, float]]:
    """Return the part of the spans (first, last, seconds) that a rewind to a step keeps."""
    return [
        (first, min(last, step), seconds * (min(last, step) - first) / (last - first))
        for first, last, seconds in made
        if first < step
    ]


def run_time(records: Iterable[Mapping[str, Any]]) -> RunTime:
    """Add up the lines of a performance file, in order.

    A `session` line starts a session at the step that it resumes from: steps computed beyond that
    one were lost. A `time` line holds the seconds since the previous line.
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
    """Read a run's performance file; all zero if there is none."""
    return run_time(JsonLinesTail(run / PERFORMANCE_FILE).records())
