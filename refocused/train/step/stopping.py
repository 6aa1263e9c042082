"""Reasons to stop early: signals, a file, limits of time and money; agreed by all ranks."""

from __future__ import annotations

import dataclasses
import enum
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.system.errors import ExitCode, StoppedEarlyError, TrainingError
from refocused.train.step.state import TrainState

if TYPE_CHECKING:
    from refocused.checkpoints.mirror.lease import Lease
    from refocused.config.run_config import RunConfig
    from refocused.system.world import World
    from refocused.train.step.reporter import Reporter

logger = logging.getLogger(__name__)

WARNING_FRACTIONS = (0.8, 0.95)  # of the budget


class StopReason(enum.IntEnum):
    """Reasons to stop; if ranks differ, the largest one counts."""

    text: str

    NONE = 0, ""
    TIME_LIMIT = 1, "run.time_limit_hours"
    BUDGET = 2, "cost.budget_usd"
    STOP_FILE = 3, "the STOP file"
    PARENT_GONE = 4, "the launcher is gone"
    SIGNAL = 5, "a signal"
    SPOT_NOTICE = 6, "a notice that the machine will be taken away"
    TAKEN_OVER = 7, "another machine that trains this run"

    def __new__(cls, value: int, text: str = "") -> StopReason:
        """Make a member of its value and its text for messages."""
        reason = int.__new__(cls, value)
        reason._value_, reason.text = value, text
        return reason

    @property
    def before_training(self) -> str:
        """What to print if training had not begun."""
        return (
            f"Stopped by {self.text} before training began; nothing was changed. The same command "
            "starts it again."
        )

    @property
    def exit_code(self) -> ExitCode:
        """The command's exit code."""
        if self in (StopReason.TIME_LIMIT, StopReason.BUDGET):
            return ExitCode.LIMIT_REACHED
        return ExitCode.INTERRUPTED if self else ExitCode.OK


@dataclasses.dataclass
class StopRequest:
    """Collects reasons to stop on this rank and agrees on them with the others."""

    world: World
    _: dataclasses.KW_ONLY
    config: RunConfig  # limits of time and money
    began_seconds: float  # when the session began, by the clock
    stop_file: Path | None  # its existence, on any storage rank's disk, is a reason
    signalled: Callable[[], bool]  # whether a signal asked this process to stop
    orphaned: Callable[[], bool]  # whether the processes that started this one are gone
    notice: Callable[[], str | None] = lambda: None  # why this machine will be taken away
    lease: Lease | None = None  # renewed on rank 0; None: a dry run
    reporter: Reporter | None = None  # knows the cost; the limits count once training begins
    clock: Callable[[], float] = time.monotonic
    _reason: StopReason = StopReason.NONE
    _is_announced: bool = False
    _warned_fraction: float = 0.0  # of the budget

    def agreed(self) -> StopReason:
        """Return why to stop, the same on every rank; every rank must call at the same place.

        Raises TrainingError on every rank if another machine trains this run now.
        """
        if self.signalled():
            self._reason = StopReason.SIGNAL
        if self._reason is StopReason.NONE:
            self._reason = self._seen()
        reason = StopReason(int(self.world.largest([self._reason])[0]))
        if reason is StopReason.TAKEN_OVER and self.lease is not None:
            raise TrainingError(self.world.broadcast(str(self.lease.lost()))).agreed()
        if reason is StopReason.SPOT_NOTICE and not self._is_announced:
            self._is_announced = True
            notice = self.notice()
            notices = self.world.gather(f"{socket.gethostname()}: {notice}" if notice else None)
            if self.world.is_rank_0:
                text = "; ".join(filter(None, notices))
                logger.warning("Spot notice to %s. The run saves and stops.", text)
        return reason

    def leave_if_asked(self) -> None:
        """Raise StoppedEarlyError on every rank if one was asked to stop before training began."""
        reason = self.agreed()
        if reason:
            raise StoppedEarlyError(reason.before_training, reason.exit_code)

    def _seen(self) -> StopReason:
        if self.lease is not None and self.lease.taken_by is not None:
            return StopReason.TAKEN_OVER
        if self.notice() is not None:
            return StopReason.SPOT_NOTICE
        if self.orphaned():
            return StopReason.PARENT_GONE
        if self.world.is_storage_rank and self.stop_file is not None and self.stop_file.exists():
            return StopReason.STOP_FILE
        if self.reporter is None or not self.world.is_rank_0:
            return StopReason.NONE
        hours, budget_usd = self.config.run.time_limit_hours, self.config.cost.budget_usd
        if budget_usd is not None:
            spent_usd = self.reporter.booked(TrainState()).cost_usd or 0.0
            share = spent_usd / budget_usd
            if share >= 1.0:
                return StopReason.BUDGET
            passed = max((mark for mark in WARNING_FRACTIONS if share >= mark), default=0.0)
            if passed > self._warned_fraction:
                self._warned_fraction = passed
                self.reporter.event(
                    "budget_warning",
                    f"The run has cost ${spent_usd:,.2f}, {share:.0%} of cost.budget_usd="
                    f"{budget_usd:,.2f}. At 100 % it saves and stops.",
                )
        if hours is not None and self.clock() - self.began_seconds >= hours * 3600:
            return StopReason.TIME_LIMIT
        return StopReason.NONE
