"""Shared by ranks and launcher: the launch, its notes, signals, the summary."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pydantic
from pydantic import Field

from refocused.system.errors import ExitCode, as_typed
from refocused.system.logs import erasure
from refocused.system.processes import LAUNCH_VARIABLE, ProcessIdentity, identify, this_process

REPEAT_SECONDS = 2.0  # the launcher repeats what the terminal sent: signals this close are one
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Notices(NamedTuple):
    """Answers to the first, second and third signal; the third ends the process."""

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
    """Counts the signals that asked this process to stop.

    The launcher signals ranks one after another and kills them 30 s later, so that a handler that
    saved by itself would wait for ranks that do not come. This one only sets a flag.

    Only a rank that `speaks`, rank 0, prints the notices on stderr.
    """

    def __init__(self, *, speaks: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.notices = STARTING
        self._speaks = speaks
        self._clock = clock
        self._count = 0
        self._last_seconds = 0.0

    @property
    def asked(self) -> bool:
        """Whether there was a signal."""
        return self._count > 0

    def install(self) -> None:
        """Handle the signals; SIGHUP only if it is not ignored, as under `nohup`."""
        for number in STOP_SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Note a signal; the third does not return."""
        now = self._clock()
        repeated = self.asked and now - self._last_seconds < REPEAT_SECONDS
        self._last_seconds = now
        if repeated:
            return
        self._count += 1
        if self._speaks:
            notice, begin = self.notices[min(self._count, 3) - 1], erasure(sys.stderr) or "\n"
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, f"{begin}{notice}\n".encode())
        if self._count > 2:
            os._exit(ExitCode.FAILED)


class RankNote(pydantic.BaseModel, frozen=True):
    """One rank's report to the supervisor."""

    rank: int
    process: ProcessIdentity
    run: str | None = None  # the run's folder, once it is open; before, nothing was written
    training: bool = False  # whether an end without a save loses steps
    exit_code: int | None = None  # reported just before the end; None: the rank did not get there
    reason: str | None = None  # name of the StopReason it ended for

    @property
    def alive(self) -> bool:
        """Whether the rank's process runs."""
        return self.process.alive


class Launch(pydantic.BaseModel, frozen=True):
    """The supervisor's settings for its ranks, and the memory that they write their notes to.

    The memory is a file without a name, which the supervisor holds open: nobody can remove it, and
    nothing is left of a launch that was killed.
    """

    began_seconds: float  # when the command began, on this machine's monotonic clock
    grace_seconds: float  # time that ranks have to stop after a signal
    command: str  # resumes the run
    crashed_seconds: float | None = None  # when the one before crashed, if this is a restart
    # When this launch began, on that clock; others may have crashed before.
    launched_seconds: float = Field(default_factory=time.monotonic)
    # The supervisor's machine (ranks elsewhere do without it), process, and file of the notes.
    host: str = Field(default_factory=socket.gethostname)
    supervisor: ProcessIdentity = Field(default_factory=this_process)
    notes_file: int = Field(default_factory=lambda: os.memfd_create("refocused-launch"))

    @property
    def environment(self) -> dict[str, str]:
        """The variable that marks the processes of this launch."""
        return {LAUNCH_VARIABLE: self.model_dump_json()}

    def open_notes(self) -> int:
        """Open the notes to append to them, or raise OSError."""
        path = f"/proc/{self.supervisor.pid}/fd/{self.notes_file}"
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def notes(self) -> list[RankNote]:
        """Return each rank's last note, by rank; only the supervisor calls this."""
        content = os.pread(self.notes_file, os.fstat(self.notes_file).st_size, 0)
        lines = content[: content.rfind(b"\n") + 1].splitlines()  # the last may be half written
        notes = {note.rank: note for note in map(RankNote.model_validate_json, lines)}
        return [notes[rank] for rank in sorted(notes)]

    def marked_processes(self) -> list[ProcessIdentity]:
        """Return the living processes of this machine that belong to the launch."""
        ((name, value),) = self.environment.items()
        mark, marked = f"{name}={value}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if mark in path.read_bytes().split(b"\0"):
                    process = identify(int(path.parent.name))
                    if process is not None and process.pid != os.getpid():
                        marked.append(process)
        return marked

    def end(self) -> None:
        """Close the notes."""
        os.close(self.notes_file)


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """Return the launch that this process belongs to; None without a supervisor here."""
    if LAUNCH_VARIABLE not in environment:
        return None
    launch = Launch.model_validate_json(environment[LAUNCH_VARIABLE])
    return launch if launch.host == socket.gethostname() else None


SUMMARY_SECONDS = 60.0  # it takes two, on a machine that has nothing else to do


def write_summary(run: Path) -> str:
    """Write the summary files in a separate process; return why that failed, else nothing."""
    reason = f"it took more than {SUMMARY_SECONDS:.0f} s"
    with contextlib.suppress(subprocess.TimeoutExpired):
        written = subprocess.run(
            [sys.executable, "-P", "-m", "refocused", "monitor", str(run), "--summary"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,  # a signal for this process does not stop it
            timeout=SUMMARY_SECONDS,
            check=False,
        )
        if written.returncode == 0:
            return ""
        reason = (written.stderr.strip().splitlines() or [f"exit code {written.returncode}"])[-1]
    fix = f"{as_typed('monitor')} {run} --summary"
    return f"{run / 'SUMMARY.md'} was not written ({reason}). Try: {fix}"
