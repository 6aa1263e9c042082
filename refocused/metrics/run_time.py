"""Where each second of a run went, over all its sessions, from its performance file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refocused.config.outputs import CostConfig
from refocused.metrics.history import EVENTS_FILE, unix_time
from refocused.metrics.jsonl import JsonLinesTail, number, whole_number
from refocused.system.errors import ExitCode, StoppedEarlyError

PERFORMANCE_FILE = Path("logs") / "performance_metrics.jsonl"
HANG = "hang"  # the alarm of the watchdog when it stops a run
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


@dataclasses.dataclass(slots=True)
class RunTime:
    """The time since a run's first start."""

    sessions: int = 0  # number of starts
    spent: TimeSpent = TimeSpent()  # of all sessions
    redone_seconds: float = 0.0  # computing steps that a rewind discarded
    away_seconds: float = 0.0  # between sessions, but not after the run had finished
    hang_seconds: float = 0.0  # from the last line to the watchdog's stop
    seconds_trained: float | None = None  # of all sessions, as recorded by the run
    cost_usd: float | None = None  # of that time; None while no price is known
    ended: float | None = None  # Unix time of the last line
    is_finished: bool = False  # the last session made the run's last step

    @property
    def elapsed_seconds(self) -> float:
        """Since the first start."""
        return self.spent.total_seconds + self.away_seconds + self.hang_seconds

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
        seconds = {
            "steps": self.productive_seconds,
            "redone steps": self.redone_seconds,
            "start-up": spent.start_up_seconds,  # of every session
            "saves": spent.save_stall_seconds,
            "validation": spent.validation_seconds,
            "data": spent.data_wait_seconds,
            "hang": self.hang_seconds,
            "down": self.away_seconds,
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


class RunTimeReader:
    """Adds up the lines of a run's performance file, in order, and the alarms that ended hangs.

    A `session` line starts a session at the step that it resumes from: steps computed beyond that
    one were lost. A `time` line holds the seconds since the previous line.
    """

    def __init__(self, run: Path | None = None) -> None:
        """Read nothing yet; without a run's folder, lines can be added all the same."""
        self._run = run
        self._tails: dict[Path, JsonLinesTail] = {}
        self._made: list[tuple[int, int, float]] = []  # first and last step, seconds
        self._hangs: list[float] = []  # when the watchdog stopped the run, in Unix seconds
        self._total = RunTime()

    def read(self) -> RunTime:
        """Add the files' new lines; return the time up to the last one, all zero without one."""
        if self._run is not None:
            events = (self._run / EVENTS_FILE).parent.glob("events*.jsonl")  # one a machine
            for path in (*events, self._run / PERFORMANCE_FILE):
                for record in self._tails.setdefault(path, JsonLinesTail(path)).records():
                    self.add(record)
        hang = self._hang_seconds(until=math.inf)
        return dataclasses.replace(self._total, hang_seconds=self._total.hang_seconds + hang)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a line or an alarm; those of other kinds do not count."""
        kind, step = record.get("kind"), whole_number(record, "step")
        now, total = unix_time(record.get("time")), self._total
        if record.get("alarm") == HANG and record.get("raised") is True and now is not None:
            self._hangs.append(now)
        if kind not in ("session", "time") or step is None:
            return
        names = TimeSpent.__dataclass_fields__
        uses = TimeSpent(*(number(record, name) or 0.0 for name in names))  # damaged: 0
        if kind == "session":
            # A rewind to a step keeps the part of each span before it.
            kept = [
                (first, min(last, step), seconds * (min(last, step) - first) / (last - first))
                for first, last, seconds in self._made
                if first < step
            ]
            total.sessions += 1
            total.redone_seconds += sum(s[2] for s in self._made) - sum(s[2] for s in kept)
            self._made = kept
            if total.ended is not None and now is not None and not total.is_finished:
                began = now - uses.total_seconds
                hang = self._hang_seconds(until=began)
                total.hang_seconds += hang
                total.away_seconds += max(0.0, began - total.ended - hang)
        elif (first := whole_number(record, "first_step")) is not None and first < step:
            self._made.append((first, step, uses.computing_seconds))
        total.ended, total.is_finished = now or total.ended, record.get(FINISHED) is True
        total.spent += uses
        for name in ("seconds_trained", "cost_usd"):
            if (known := number(record, name)) is not None:
                setattr(total, name, known)

    def _hang_seconds(self, *, until: float) -> float:
        """Return the time from the last line to the last end of a hang after it."""
        ended = self._total.ended
        return max(
            (at - ended for at in self._hangs if ended is not None and ended < at <= until),
            default=0.0,
        )


def require_budget(
    run: Path, cost: CostConfig, *, is_done: bool | None = None, saved_usd: float | None = None
) -> None:
    """Raise StoppedEarlyError if a run with steps left has spent its budget.

    The checkpoint that it resumes knows whether it `is_done`, and what it cost before its save.
    """
    used = RunTimeReader(run).read()
    spent = max(used.cost_usd or 0.0, saved_usd or 0.0)
    is_done = used.is_finished if is_done is None else is_done
    if not is_done and cost.budget_usd is not None and spent >= cost.budget_usd:
        raise StoppedEarlyError(
            f"Nothing was started: the run has cost ${spent:,.2f}, and cost.budget_usd is "
            f"{cost.budget_usd:,.2f}. To go on, raise it in the same command.",
            ExitCode.LIMIT_REACHED,
        )
