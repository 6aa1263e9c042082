"""Why training should stop early: signals, limits of time and money, agreed by all ranks."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path

from refocused.system.errors import ExitCode, StoppedEarlyError
from refocused.system.world import World


class StopReason(enum.IntEnum):
    """Reasons to stop; where ranks differ, the largest one counts."""

    NONE = 0
    TIME_LIMIT = 1
    BUDGET = 2
    STOP_FILE = 3
    PARENT_GONE = 4
    SIGNAL = 5

    @property
    def text(self) -> str:
        """What a person is told."""
        return {
            StopReason.NONE: "",
            StopReason.TIME_LIMIT: "run.time_limit_hours",
            StopReason.BUDGET: "cost.budget_usd",
            StopReason.STOP_FILE: "the STOP file",
            StopReason.PARENT_GONE: "the launcher is gone",
            StopReason.SIGNAL: "a signal",
        }[self]

    @property
    def exit_code(self) -> ExitCode:
        """What the command's exit status says of it."""
        if self in (StopReason.TIME_LIMIT, StopReason.BUDGET):
            return ExitCode.LIMIT_REACHED
        return ExitCode.INTERRUPTED if self else ExitCode.OK


class StopRequest:
    """Collects reasons to stop on this rank and agrees on them with the others."""

    def __init__(
        self,
        world: World,
        *,
        stop_file: Path | None,
        signalled: Callable[[], bool],
        orphaned: Callable[[], bool],
    ) -> None:
        """Watch for a file, signals and the launcher's end.

        Args:
            world: The ranks.
            stop_file: Its existence asks to stop, on any storage rank's disk. None: there is none.
            signalled: Whether a signal asked this process to stop.
            orphaned: Whether the processes that started this one are gone.
        """
        self._world = world
        self._stop_file = stop_file
        self._signalled = signalled
        self._orphaned = orphaned
        self._limits: list[Callable[[], StopReason]] = []
        self._reason = StopReason.NONE

    def obey(self, limit: Callable[[], StopReason]) -> None:
        """Also stop when this, asked on rank 0, gives a reason."""
        self._limits.append(limit)

    def agreed(self) -> StopReason:
        """Return why to stop, the same on every rank; every rank must call at the same place."""
        if self._signalled():
            self._reason = StopReason.SIGNAL
        if self._reason is StopReason.NONE:
            self._reason = self._seen()
        return StopReason(int(self._world.largest([self._reason])[0]))

    def leave_if_asked(self) -> None:
        """End a run that has not begun to train, at a place that every rank passes.

        Raises:
            StoppedEarlyError: On every rank: one of them was asked to stop.
        """
        reason = self.agreed()
        if reason:
            raise StoppedEarlyError(
                f"Stopped by {reason.text} before training began; nothing was changed. The same "
                "command starts it again.",
                reason.exit_code,
            )

    def _seen(self) -> StopReason:
        if self._orphaned():
            return StopReason.PARENT_GONE
        if self._world.is_storage_rank and self._stop_file is not None and self._stop_file.exists():
            return StopReason.STOP_FILE
        if not self._world.is_rank_0:
            return StopReason.NONE
        return max((limit() for limit in self._limits), default=StopReason.NONE)


WARNING_FRACTIONS = (0.8, 0.95)


def time_limit(
    hours: float, *, began_seconds: float, clock: Callable[[], float]
) -> Callable[[], StopReason]:
    """Return what says whether a session has taken its time.

    Args:
        hours: Since the command began.
        began_seconds: When that was, by the clock.
        clock: Monotonic seconds.
    """

    def look() -> StopReason:
        passed = clock() - began_seconds >= hours * 3600
        return StopReason.TIME_LIMIT if passed else StopReason.NONE

    return look


class Budget:
    """Says when a run has cost what it may, and warns before."""

    def __init__(
        self, budget_usd: float, *, spent_usd: Callable[[], float], warn: Callable[[str], None]
    ) -> None:
        """Watch the money.

        Args:
            budget_usd: Of the whole run, over all its sessions.
            spent_usd: What it has cost so far.
            warn: Told once, at the highest of `WARNING_FRACTIONS` that is passed, and at each
                further one.
        """
        self._budget_usd = budget_usd
        self._spent_usd = spent_usd
        self._warn = warn
        self._warned = 0.0

    def __call__(self) -> StopReason:
        """Return BUDGET when it is spent."""
        spent = self._spent_usd()
        share = spent / self._budget_usd
        if share >= 1.0:
            return StopReason.BUDGET
        passed = max((mark for mark in WARNING_FRACTIONS if share >= mark), default=0.0)
        if passed > self._warned:
            self._warned = passed
            self._warn(
                f"The run has cost ${spent:,.2f}, {share:.0%} of cost.budget_usd="
                f"{self._budget_usd:,.2f}. At 100 % it is saved and stops."
            )
        return StopReason.NONE
