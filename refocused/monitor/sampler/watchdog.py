"""Watch this machine's ranks from outside; explain a hang, and stop the run.

Nothing here waits for a rank, and the run's disk is waited for only for a bounded time: it may be
the cause. Ranks of other machines are seen by the watchdogs there.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import ipaddress
import json
import logging
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from refocused.metrics.jsonl import JsonLines, read_json, write_state
from refocused.monitor.readings import AlarmEvent, GpuSample, as_record
from refocused.monitor.sampler.alarms import alarm_rules
from refocused.monitor.sampler.hangs import (
    DISK_WAIT,
    FIRST_STEPS,
    Explanation,
    Seen,
    Watch,
    explain,
    report,
)
from refocused.monitor.sampler.start_sampler import SamplerSettings
from refocused.system.errors import ExitCode
from refocused.system.progress import STACKS_SIGNAL, Place, Progress

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
STACKS_SECONDS = 3.0  # for ranks to write their stacks and collectives
DISK_SECONDS = 10.0  # for the run's disk to take the report
OTHERS_SECONDS = 10.0  # for the watchdog of the machine whose rank is missing to be first
EXIT_SECONDS = 6.0  # for ranks to exit; launchers return the code of the first
REPEATED = 4  # packets without an acknowledgement
CONTINUED_SECONDS = 1.0  # for a rank that was stopped to write its stacks
_FRAME = re.compile(
    r'^  File "(?:.*/(?:site-packages|python3[.0-9]*)/|.*(?=refocused/))?(.+)", line (\d+) in (.+)$'
)


class Watchdog:
    """Watches from a thread of the sampler's process, whose other work may wait for a disk.

    Its `event` is the alarm, once the run was stopped. With `run.hang_minutes: 0` it stops nothing:
    `idle_seconds` tells how long the ranks have hung (0: they do not), otherwise it is None.
    """

    def __init__(self, settings: SamplerSettings, gpus: Callable[[], Sequence[GpuSample]]) -> None:
        """Watch until all ranks of this machine have ended; `gpus` are the newest readings."""
        self.event: AlarmEvent | None = None
        self._settings, self._gpus = settings, gpus
        self.idle_seconds = None if settings.hang_minutes != 0 else 0.0
        self._watch = Watch(settings.hang_minutes or None)
        self._ranks: list[RankProbe] = []
        for place in settings.places:
            with contextlib.suppress(OSError):  # it has ended
                self._ranks += [RankProbe(place)] if place.node == settings.node else []
        self._thread = threading.Thread(target=self._watch_ranks, daemon=True)
        self._thread.start()

    @property
    def is_stepping(self) -> bool:
        """Whether this machine's ranks take steps, the first ones aside, and none validates."""
        moments = [rank.progress.moment() for rank in self._alive()]
        late = [each for each in moments if each.activity not in ("step", "data")]
        return bool(moments) and not late and all(each.taken > FIRST_STEPS for each in moments)

    def wait_for_steps(self) -> None:
        """Wait until this machine's ranks have started, or ended: files are of an earlier start."""
        while any(rank.progress.moment().activity == "start-up" for rank in self._alive()):
            time.sleep(POLL_SECONDS)

    def finish(self) -> None:
        """Wait until all ranks of a run that is being stopped have ended."""
        if self.event is not None:
            self._thread.join()

    def _alive(self) -> list[RankProbe]:
        return [rank for rank in self._ranks if rank.place.process.alive]

    def _watch_ranks(self) -> None:
        try:
            while alive := self._alive():
                moments = {rank.place.rank: rank.progress.moment() for rank in alive}
                idle = self._watch.observe(moments, time.monotonic())
                if self.idle_seconds is not None:
                    self.idle_seconds = idle
                elif idle:
                    self._explain_and_stop(alive, idle)
                time.sleep(POLL_SECONDS)
        except Exception:  # the edge of a background owner
            logger.exception("The watchdog failed; a hang would not be noticed any more")

    def _explain_and_stop(self, alive: Sequence[RankProbe], idle: float) -> None:
        for rank in alive:
            rank.begin()
        deadline = time.monotonic() + STACKS_SECONDS
        while time.monotonic() < deadline and not all(
            rank.stacks and rank.progress.collectives() is not None for rank in alive
        ):
            time.sleep(0.1)
        ranks = [rank.seen() for rank in alive]
        explanation, limit = explain(ranks), self._watch.limit_seconds
        text = self._write(
            explanation, functools.partial(report, ranks, explanation, idle, limit, ExitCode.HUNG)
        )
        logger.error("%s", text)
        if explanation.cause == "none":
            time.sleep(OTHERS_SECONDS)
        # Make ranks exit by themselves, for the exit code; then kill those that cannot.
        ending = self._alive()
        ending.sort(key=lambda rank: rank.progress.moment().beat_seconds > EXIT_SECONDS / 2)
        for number, rank in enumerate(ending):  # the first one that has the interpreter prints it
            rank.progress.order(ExitCode.HUNG, "" if number else text)
        deadline = time.monotonic() + EXIT_SECONDS
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.2)
        for rank in self._alive():
            rank.send(signal.SIGKILL)
        # A rank may have written another state meanwhile.
        in_time(self._write_state)

    def _write(self, explanation: Explanation, text: Callable[[Path], str]) -> str:
        """Write the report and the alarm; return the text, which names the report's file."""
        settings, rule = self._settings, alarm_rules()["hang"]
        now, host = datetime.datetime.now(datetime.UTC), self._ranks[0].place.host
        event = AlarmEvent("hang", "run", True, rule.severity, explanation.text, host, rule.advice)
        self.event = event
        stacks = [f"rank {rank.place.rank}\n{rank.stacks}" for rank in self._ranks]
        gpus = [json.dumps(as_record(gpu)) for gpu in self._gpus()] or ["none"]
        rest = "\n\n".join(["", "GPUs", *gpus, *stacks, ""])
        file = settings.log(f"hang-{now:%Y%m%d-%H%M%S}.txt")

        def write() -> None:
            file.write_text(text(file) + rest)
            JsonLines(settings.log("events.jsonl")).write(as_record(event))

        if in_time(write):
            return text(file)
        spare = Path(tempfile.gettempdir()) / f"refocused-{file.name}"  # the run's disk takes none
        in_time(lambda: spare.write_text(text(spare) + rest))
        return text(spare)

    def _write_state(self) -> None:
        file = self._settings.run / "state.json"
        if self._settings.node == 0 and (state := read_json(file)) is not None:
            write_state(file, {**state, "status": "failed", "exit_code": int(ExitCode.HUNG)})


def in_time(write: Callable[[], object]) -> bool:
    """Write to a disk that may be dead; return whether that was done in time."""
    done = threading.Event()

    def carry_out() -> None:
        with contextlib.suppress(OSError):
            write()
            done.set()

    threading.Thread(target=carry_out, daemon=True).start()
    return done.wait(DISK_SECONDS)


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
            places = (f"{match[1]}:{match[2]} in {match[3]}" for match in frames if match)
            return tuple(
                match for match in places if "system/progress.py" not in match
            )  # halts there
    return ()


def unanswered(pid: int) -> tuple[str, ...]:
    """Return the addresses that have acknowledged nothing of what a process sent them repeatedly.

    The kernel counts in `/proc/PID/net/tcp` what it sent again since the last acknowledgement, and
    its probes. A process that is stopped or busy acknowledges, a host or network that is dead does
    not; nor do packets that are too large for a link arrive.
    """
    process, addresses = Path(f"/proc/{pid}"), set[str]()
    with contextlib.suppress(OSError):
        sockets = {str(file.readlink()) for file in (process / "fd").iterdir()}
        rows = (process / "net/tcp").read_text() + (process / "net/tcp6").read_text()
        for columns in map(str.split, rows.splitlines()):
            is_own = f"socket:[{columns[9]}]" in sockets
            if is_own and int(columns[6], 16) + int(columns[8]) >= REPEATED:
                words = bytes.fromhex(columns[2].partition(":")[0])  # each of 4 bytes, reversed
                ordered = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                address = ipaddress.ip_address(ordered)
                addresses.add(str(getattr(address, "ipv4_mapped", None) or address))
    return tuple(sorted(addresses))


def in_kernel(pid: int, *, all_threads: bool = False) -> tuple[str, str]:
    """Return a main thread's state, and the kernel's function it waits in, if that is known.

    With `all_threads`, return those of any thread that waits for a disk instead, if one does.
    """
    main = Path(f"/proc/{pid}/task/{pid}")
    states = []
    with contextlib.suppress(OSError):
        for thread in [main, *(main.parent.iterdir() if all_threads else ())]:
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            function = (thread / "wchan").read_text().strip()
            states.append((state, "" if function == "0" else function))
    waiting = [each for each in states if each[0] == "D" or DISK_WAIT.search(each[1])]
    return [*waiting, *states, ("", "")][0]
