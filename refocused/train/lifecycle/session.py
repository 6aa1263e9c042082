"""This process's session: who asks it to stop, who started it, when it began."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import signal
import threading
import time

from refocused.train.lifecycle.ancestors import Ancestors, stopped_ranks
from refocused.train.lifecycle.launch_session import (
    ENDING_NUMBERS,
    Launch,
    Notices,
    Presence,
    Signals,
    launch_of,
)

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0

UNSUPERVISED = Notices(
    "^C    stopping after this step and saving; the launcher allows 30 s. A STOP file in the run's "
    "folder stops without a limit."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """What a rank knows before it has joined the others.

    Attributes:
        signals: Installed.
        ancestors: As they were at the start.
        presence: Its notes to the supervisor.
        began_seconds: When the command began, on this machine's monotonic clock.
        rank_began_seconds: When this process did; the launcher may have started others before.
        launch: The supervisor's; None without one.
    """

    signals: Signals
    ancestors: Ancestors
    presence: Presence
    began_seconds: float
    rank_began_seconds: float
    launch: Launch | None

    @property
    def training_notices(self) -> Notices:
        """What signals lead to while there is something to save."""
        if self.launch is None:
            return UNSUPERVISED
        return Notices(
            "^C    stopping after this step and saving; "
            f"{self.launch.grace_seconds:.0f} s are allowed for it. Once more leaves less time, a "
            "third time ends it unsaved."
        )


def begin_session(rank: int) -> Session:
    """Take over the signals and tell the supervisor that this rank is here."""
    now = time.monotonic()
    signals = Signals(speaks=rank == 0)
    signals.install()
    launch = launch_of(os.environ)
    ancestors = Ancestors(launch)
    threading.Thread(
        target=_continue_stopped_ranks, args=(_signal_pipe(), ancestors), daemon=True
    ).start()
    return Session(
        signals=signals,
        ancestors=ancestors,
        presence=Presence(launch, rank),
        began_seconds=launch.began_seconds if launch is not None else now,
        rank_began_seconds=now,
        launch=launch,
    )


def _signal_pipe() -> int:
    """Return a pipe to read the numbers of signals from as they arrive.

    Python runs a handler only when the main thread returns from C, which does not happen while it
    waits for another rank.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _continue_stopped_ranks(signals: int, ancestors: Ancestors) -> None:
    """Once the run should stop, continue this machine's stopped ranks: all ranks save together."""
    stopping = False
    while True:
        if select.select([signals], [], [], LOOK_SECONDS)[0]:
            stopping = stopping or any(n in ENDING_NUMBERS for n in os.read(signals, 64))
        stopping = stopping or ancestors.gone
        for rank, pid in stopped_ranks() if stopping else ():
            logger.warning(
                "Rank %d (process %d) is stopped (SIGSTOP). Continuing it (SIGCONT), because all "
                "ranks must save and stop together.",
                rank,
                pid,
            )
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
