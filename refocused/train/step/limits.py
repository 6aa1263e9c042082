"""The limits of time and money that a run keeps to."""

from __future__ import annotations

from collections.abc import Callable

from refocused.train.step.stopping import StopReason

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
