"""The signals that ask this process to stop: the handlers only take notes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from refocused.system.errors import ExitCode

REPEAT_SECONDS = 2.0  # the launcher repeats what the terminal sent: signals this close are one
ENDING_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclasses.dataclass(frozen=True, slots=True)
class Notices:
    """What is said to a signal: what it leads to, and what one more would.

    Attributes:
        first: To the first one.
        again: To the second.
        at_once: To the third, which ends the process.
    """

    first: str
    again: str = "^C    already stopping; once more ends it at once, and what is not saved is lost"
    at_once: str = "^C    ended at once, without saving"


STARTING = Notices("^C    stopping before training begins")
ENDING = Notices(
    "^C    training is over; it ends without waiting for uploads and the final model, which go on "
    "in the background",
    "^C    training is over and it is ending; once more ends it at once, and what is saved stays",
    "^C    ended at once, after training",
)


class Signals:
    """Counts the times that somebody asked this process to stop.

    The launcher signals ranks one after another and kills them 30 s later, so a handler that
    saved by itself would wait for ranks that do not come. Ours notes the first, says at the second
    that it is known, and ends the process at the third.
    """

    def __init__(self, *, speaks: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Note nothing before `install`.

        Args:
            speaks: Whether to say on stderr what a signal leads to; rank 0 does.
            clock: Monotonic seconds.
        """
        self.notices = STARTING
        self._speaks = speaks
        self._clock = clock
        self._count = 0
        self._last_seconds = 0.0

    @property
    def asked(self) -> bool:
        """Whether there was one."""
        return self._count > 0

    def install(self) -> None:
        """Take over the signals; SIGHUP only where `nohup` does not keep it away."""
        for number in ENDING_NUMBERS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Note a signal; the third does not return."""
        now = self._clock()
        repeated = self.asked and now - self._last_seconds < REPEAT_SECONDS
        self._last_seconds = now
        if repeated:
            return
        self._count += 1
        said = self.notices
        self._say(
            said.first if self._count == 1 else said.again if self._count == 2 else said.at_once
        )
        if self._count > 2:
            os._exit(ExitCode.FAILED)

    def _say(self, text: str) -> None:
        if self._speaks:
            with contextlib.suppress(OSError):  # the terminal may be what is gone
                os.write(2, f"\n{text}\n".encode())
