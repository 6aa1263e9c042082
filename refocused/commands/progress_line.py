"""A line that says how far a long command is, how fast, and how much longer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from refocused.commands.output import duration_text, size_text

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 10.0


class ProgressLine:
    """Shows progress in bytes: one line that moves on a terminal, a line now and then elsewhere.

    The first call says where it starts from: what was done by then does not count for the rate.

    Args:
        what: First word of the line.
        stream: Where it goes; standard error when None.
        clock: Seconds, for the rate; it must not jump.
    """

    def __init__(
        self,
        what: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._stream = stream or sys.stderr
        self._clock = clock
        self._terminal = self._stream.isatty()
        self._started = clock()
        self._kept_bytes: int | None = None
        self._shown = self._started - (0.0 if not self._terminal else TERMINAL_SECONDS)
        self._width = 0

    def show(self, done_bytes: int, total_bytes: int, note: str = "") -> None:
        """Show how far it is, unless that was shown a moment ago."""
        if self._kept_bytes is None:
            self._kept_bytes = done_bytes
        now = self._clock()
        if now - self._shown < (TERMINAL_SECONDS if self._terminal else LOG_SECONDS):
            return
        self._shown = now
        line = self.text(done_bytes, total_bytes, note)
        if self._terminal:
            self._stream.write(f"\r{line.ljust(self._width)}")
            self._width = len(line)
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def text(self, done_bytes: int, total_bytes: int, note: str = "") -> str:
        """Return the line; the rate is that of this start, over all its time."""
        seconds = self._clock() - self._started
        rate = (done_bytes - (self._kept_bytes or 0)) / seconds if seconds > 0 else 0.0
        left = duration_text((total_bytes - done_bytes) / rate) if rate else "unknown"
        share = 100 * done_bytes / total_bytes if total_bytes else 100.0
        parts = [
            f"{self._what} {share:5.1f} %",
            f"{size_text(done_bytes)} of {size_text(total_bytes)}",
            f"{size_text(rate)}/s",
            f"left {left}",
        ]
        return " | ".join([*parts, note] if note else parts)

    def end(self) -> None:
        """Leave the line, so that the next output begins a new one."""
        if self._terminal and self._width:
            self._stream.write("\n")
            self._stream.flush()
