"""Look at one rank from outside: its process in the kernel, its stacks, its collectives."""

import contextlib
import ctypes
import os
import re
import signal
import time
from pathlib import Path

from refocused.monitor.sampler.hangs import Seen
from refocused.system.progress import ASKED, BEATER, MAIN, STACKS_SIGNAL, Place, Progress

CONTINUED_SECONDS = 1.0  # for a rank that was stopped to write its stacks
_FRAME = re.compile(
    r'^  File "(?:.*/(?:site-packages|python3[.0-9]*)/|.*(?=refocused/))?(.+)", line (\d+) in (.+)$'
)


class RankProbe:
    """One rank of this machine."""

    def __init__(self, place: Place) -> None:
        """Open its memory; raise OSError if it has ended."""
        self.place, self.progress = place, Progress.of(place)
        self._file = Path(f"/proc/{place.process.pid}/fd/{place.files[1]}")
        self._before = 0  # bytes of stacks that were written earlier

    def begin(self) -> None:
        """Note the state of its process, then make it write its stacks and collectives."""
        pid = self.place.process.pid
        self._moment, self._kernel = self.progress.moment(), in_kernel(pid)
        self._before = len(self._written())
        self.progress.fields[ASKED] = 1
        # To a thread that waits for no disk; the handler needs no interpreter.
        ctypes.CDLL(None).tgkill(pid, self.progress.fields[BEATER], STACKS_SIGNAL)

    @property
    def stacks(self) -> str:
        """What it has written since."""
        return self._written()[self._before :].decode(errors="replace")

    def seen(self) -> Seen:
        """Return what was found out; continue a stopped process, which first writes its stacks."""
        state, function = self._kernel
        deadline = time.monotonic() + CONTINUED_SECONDS
        if state in ("T", "t"):
            self.send(signal.SIGCONT)
            while not self.stacks and time.monotonic() < deadline:
                time.sleep(0.02)
        return Seen(
            rank=self.place.rank,
            host=self.place.host,
            pid=self.place.process.pid,
            moment=self._moment,
            state=state if self.place.process.alive else "",
            kernel=function,
            frames=main_frames(self.stacks, self.progress.fields[MAIN]),
            collectives=self.progress.collectives() or (),
        )

    def send(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        with contextlib.suppress(OSError):
            os.kill(self.place.process.pid, number)

    def _written(self) -> bytes:
        with contextlib.suppress(OSError):
            return self._file.read_bytes()
        return b""


def main_frames(stacks: str, main: int) -> tuple[str, ...]:
    """Return the frames of the thread `main` from what faulthandler wrote, innermost first."""
    for section in stacks.split("\n\n"):
        head, _, body = section.partition("\n")
        if f"0x{main:016x}" in head:
            frames = (_FRAME.match(line) for line in body.splitlines())
            return tuple(f"{one[1]}:{one[2]} in {one[3]}" for one in frames if one)
    return ()


def in_kernel(pid: int) -> tuple[str, str]:
    """Return a main thread's state, and the kernel's function it waits in, if that is known."""
    thread, state, function = Path(f"/proc/{pid}/task/{pid}"), "", ""
    with contextlib.suppress(OSError):
        state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
        function = (thread / "wchan").read_text().strip()
    return state, "" if function == "0" else function
