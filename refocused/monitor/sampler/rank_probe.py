"""Look at one rank from outside: its process in the kernel, its stacks, its collectives."""

import contextlib
import ctypes
import ipaddress
import os
import re
import signal
import time
from pathlib import Path

from refocused.monitor.sampler.hangs import DISK_WAIT, Seen
from refocused.system.progress import STACKS_SIGNAL, Place, Progress

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

    def begin(self) -> None:
        """Note the state of its process, then make it write its stacks and collectives."""
        pid = self.place.process.pid
        self._moment = self.progress.moment()
        self._kernel = in_kernel(pid, all_threads=self._moment.activity == "data")
        self.progress.asked = 1
        # To a thread that waits for no disk; the handler needs no interpreter.
        ctypes.CDLL(None).tgkill(pid, self.progress.beater, STACKS_SIGNAL)

    @property
    def stacks(self) -> str:
        """What it has written."""
        with contextlib.suppress(OSError):
            return self._file.read_text(errors="replace")
        return ""

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
            frames=main_frames(self.stacks, self.progress.main),
            collectives=self.progress.collectives() or (),
            unanswered=unanswered(self.place.process.pid),
        )

    def send(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        with contextlib.suppress(OSError):
            os.kill(self.place.process.pid, number)


def main_frames(stacks: str, main: int) -> tuple[str, ...]:
    """Return the frames of the thread `main` from what faulthandler wrote, innermost first."""
    for section in stacks.split("\n\n"):
        head, _, body = section.partition("\n")
        if f"0x{main:016x}" in head:
            frames = (_FRAME.match(line) for line in body.splitlines())
            places = (f"{one[1]}:{one[2]} in {one[3]}" for one in frames if one)
            return tuple(one for one in places if "system/progress.py" not in one)  # halts there
    return ()


def unanswered(pid: int, *, least: int = 4) -> tuple[str, ...]:
    """Return the addresses that have acknowledged nothing of what a process sent them repeatedly.

    The kernel counts in `/proc/PID/net/tcp` what it sent again since the last acknowledgement, and
    its probes. A process that is stopped or busy acknowledges, a host or network that is dead does
    not; nor do packets that are too large for a link arrive.
    """
    process, found = Path(f"/proc/{pid}"), set[str]()
    with contextlib.suppress(OSError):
        sockets = {str(file.readlink()) for file in (process / "fd").iterdir()}
        rows = (process / "net/tcp").read_text() + (process / "net/tcp6").read_text()
        for columns in map(str.split, rows.splitlines()):
            is_own = f"socket:[{columns[9]}]" in sockets
            if is_own and int(columns[6], 16) + int(columns[8]) >= least:
                words = bytes.fromhex(columns[2].partition(":")[0])  # each of 4 bytes, reversed
                ordered = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                address = ipaddress.ip_address(ordered)
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return tuple(sorted(found))


def in_kernel(pid: int, *, all_threads: bool = False) -> tuple[str, str]:
    """Return a main thread's state, and the kernel's function it waits in, if that is known.

    With `all_threads`, return those of any thread that waits for a disk instead, if one does.
    """
    main = Path(f"/proc/{pid}/task/{pid}")
    found = []
    with contextlib.suppress(OSError):
        for thread in [main, *(main.parent.iterdir() if all_threads else ())]:
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            function = (thread / "wchan").read_text().strip()
            found.append((state, "" if function == "0" else function))
    waiting = [one for one in found if one[0] == "D" or DISK_WAIT.search(one[1])]
    return [*waiting, *found, ("", "")][0]
