"""What a supervisor decides, in pure functions: the end of patience, what an end means, alarms."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from refocused.monitor.readings import AlarmEvent
from refocused.system.errors import ExitCode
from refocused.train.lifecycle.launch_session import RankNote

HURRIED_SECONDS = 30.0  # left after the second signal
LAST_RANKS_SECONDS = 30.0  # left to the other ranks when one has ended; rarely more than two

_PARENT_GONE = "PARENT_GONE"


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:
    """What the supervisor has seen so far; times are in seconds on one clock.

    Attributes:
        signals: When each one came.
        abandoned: When the `deepspeed` command was gone while processes of it lived on.
        rank_ended: When a rank was first seen to have ended.
    """

    signals: tuple[float, ...] = ()
    abandoned: float | None = None
    rank_ended: float | None = None


def patience_ends(sight: Sight, *, grace_seconds: float) -> float | None:
    """Return when everything that is left is to be killed; None while nobody waits for an end."""
    ends = []
    if sight.signals:
        ends.append(sight.signals[0] + grace_seconds)
    if len(sight.signals) > 1:
        ends.append(sight.signals[1] + HURRIED_SECONDS)
    if len(sight.signals) > 2:
        ends.append(sight.signals[2])
    if sight.abandoned is not None:
        ends.append(sight.abandoned + grace_seconds)
    if sight.rank_ended is not None:
        ends.append(sight.rank_ended + LAST_RANKS_SECONDS)
    return min(ends, default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How a launch ended.

    Attributes:
        code: The exit code that is true, whatever the launcher's was.
        text: What the ranks could not say themselves; empty when they said everything.
        crashed: Whether nobody wished it to end: starting again may help.
    """

    code: ExitCode
    text: str = ""
    crashed: bool = False


def judge(notes: Sequence[RankNote], *, launcher_code: int, signals: int, killed: bool) -> Verdict:
    """Say what the end of a launch means.

    Args:
        notes: What its ranks said.
        launcher_code: What the `deepspeed` command returned; negative: the signal that ended it.
        signals: How many times it was asked to stop.
        killed: Whether patience ended before it did.
    """
    first = notes[0] if notes and notes[0].rank == 0 else None
    code = None if first is None else first.exit_code
    lost = [note.rank for note in notes if note.exit_code is None]
    if code is not None and code != ExitCode.FAILED:
        assert first is not None  # it has a code
        return Verdict(ExitCode(code), crashed=first.reason == _PARENT_GONE and not signals)
    if signals and not any(note.training for note in notes):
        return Verdict(ExitCode.INTERRUPTED, "Stopped before training began; nothing was changed.")
    if signals and (killed or lost):
        return Verdict(
            ExitCode.FAILED,
            f"{_ranks(lost)} ended unsaved: what came after the last checkpoint is lost.",
        )
    if lost:
        return Verdict(
            ExitCode.FAILED,
            f"{_ranks(lost)} {'was' if len(lost) == 1 else 'were'} {_cause(launcher_code)}",
            crashed=not signals,
        )
    if notes:
        return Verdict(ExitCode.FAILED, crashed=not signals)
    if launcher_code in (ExitCode.OK, ExitCode.WRONG_USE):
        return Verdict(ExitCode(launcher_code))
    return Verdict(
        ExitCode.FAILED,
        f"deepspeed ended with {launcher_code} before any rank had begun; what it said is above.",
    )


def alarm_line(record: Mapping[str, Any]) -> str | None:
    """Return what a person reads of a line of `events.jsonl`; None: nothing.

    Only alarms that begin, and not those of the budget, which the run itself tells.
    """
    is_alarm = record.get("kind") == AlarmEvent.kind and record.get("raised")
    if not is_alarm or str(record.get("alarm")).startswith("budget"):
        return None
    return f"{'ALARM' if record.get('severity') == 'critical' else 'WARN '} {record.get('text')}"


def may_restart(verdict: Verdict, *, allowed: int, fruitless: int) -> bool:
    """Whether to start again.

    Args:
        verdict: How the last start ended.
        allowed: Starts again, in a row, that may end without a newer checkpoint.
        fruitless: Starts in a row, the last one included, that ended so.
    """
    return verdict.crashed and fruitless <= allowed and allowed > 0


def _ranks(numbers: Sequence[int]) -> str:
    if not numbers:
        return "A rank"
    return f"{'Rank' if len(numbers) == 1 else 'Ranks'} {', '.join(map(str, numbers))}"


def _cause(launcher_code: int) -> str:
    """Say what killed a rank; the launcher returns 256 - N for the signal N."""
    try:
        name = signal.Signals(256 - launcher_code).name
    except ValueError:
        name = ""
    by = f" by {name}" if name else ""
    if name in ("", "SIGKILL"):
        return f"killed{by}, most often for want of memory (see dmesg)."
    return f"killed{by}; what it said is above or in the run's logs/rank-N.log."
