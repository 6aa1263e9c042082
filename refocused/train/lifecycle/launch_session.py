"""What connects a rank with its launch: signals, the supervisor's folder, presence."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

import pydantic

from refocused.system.atomic_files import replace_file
from refocused.system.errors import ExitCode
from refocused.system.processes import LAUNCH_VARIABLE, ProcessIdentity, identify, this_process

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


_LAUNCH_FILE = "launch.json"
_FOLDER_PREFIX = "refocused-launch-"


class Launch(pydantic.BaseModel):
    """What the supervisor tells its ranks.

    Attributes:
        folder: Of this launch; every process of it carries the path in its environment.
        host: The supervisor's machine; ranks elsewhere do without it.
        supervisor: The process.
        began_seconds: When the command began, on this machine's monotonic clock.
        grace_seconds: Time between a signal and the end of patience.
        command: What takes the run up again.
    """

    model_config = pydantic.ConfigDict(frozen=True)

    folder: Path
    host: str
    supervisor: ProcessIdentity
    began_seconds: float
    grace_seconds: float
    command: str

    @classmethod
    def create(cls, *, began_seconds: float, grace_seconds: float, command: str) -> Launch:
        """Make the folder of a launch of which this process is the supervisor.

        Folders of launches of which every process was killed are removed.

        Raises:
            OSError: It cannot be written.
        """
        for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
            other = _launch_in(left)
            if other is not None and not other.alive:
                other.remove()
        launch = cls(
            folder=Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX)),
            host=socket.gethostname(),
            supervisor=this_process(),
            began_seconds=began_seconds,
            grace_seconds=grace_seconds,
            command=command,
        )
        (launch.folder / _LAUNCH_FILE).write_text(launch.model_dump_json())
        return launch

    @property
    def environment(self) -> dict[str, str]:
        """What tells a process that it belongs to this launch."""
        return {LAUNCH_VARIABLE: str(self.folder)}

    def notes(self) -> list[RankNote]:
        """Return what each rank said last, by rank; ranks that said nothing are missing."""
        notes = []
        for path in self.folder.glob("rank-*.json"):
            with contextlib.suppress(OSError, pydantic.ValidationError):
                notes.append(RankNote.model_validate_json(path.read_bytes()))
        return sorted(notes, key=lambda note: note.rank)

    @property
    def alive(self) -> bool:
        """Whether a process of it runs: the supervisor, a rank, or what a rank started."""
        is_known = self.supervisor.alive or any(note.alive for note in self.notes())
        return is_known or bool(marked_processes(self.folder))

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """Return the launch that this process belongs to; None without a supervisor here."""
    folder = environment.get(LAUNCH_VARIABLE)
    if folder is None:
        return None
    return _launch_in(Path(folder))


def _launch_in(folder: Path) -> Launch | None:
    """Return the launch of this machine that a folder belongs to; None: there is none."""
    try:
        launch = Launch.model_validate_json((folder / _LAUNCH_FILE).read_bytes())
    except (OSError, pydantic.ValidationError):
        return None
    return launch if launch.host == socket.gethostname() else None


class RankNote(pydantic.BaseModel):
    """What one rank says of itself.

    Attributes:
        rank: Its number.
        process: Its process.
        run: The run's folder, once it is open; before, nothing was written anywhere.
        training: Whether the loop has begun: from there on, an end without a save loses steps.
        exit_code: What it ended with, said just before it did; None: it did not get to that.
        reason: Name of the StopReason it ended for.
    """

    model_config = pydantic.ConfigDict(frozen=True)

    rank: int
    process: ProcessIdentity
    run: str | None = None
    training: bool = False
    exit_code: int | None = None
    reason: str | None = None

    @property
    def alive(self) -> bool:
        """Whether the rank's process runs."""
        return self.process.alive


class Presence:
    """A rank's notes to its supervisor; without one they go nowhere."""

    def __init__(self, launch: Launch | None, rank: int) -> None:
        """Say that this rank is here."""
        self._launch = launch
        self._note = RankNote(rank=rank, process=this_process())
        self.tell()

    def tell(self, **facts: object) -> None:
        """Replace the note by one with other facts; a disk that is full keeps the old one."""
        self._note = self._note.model_copy(update=facts)
        if self._launch is None:
            return
        path = self._launch.folder / f"rank-{self._note.rank}.json"
        with contextlib.suppress(OSError):
            replace_file(path, self._note.model_dump_json().encode())

    def leave(self, exit_code: int) -> None:
        """Say what this rank ends with, and remove what a dead supervisor left.

        Every rank does: the first one may fail where another writes its last note.
        """
        self.tell(exit_code=exit_code)
        if self._launch is not None and not self._launch.supervisor.alive:
            self._launch.remove()


def marked_processes(folder: Path) -> list[ProcessIdentity]:
    """Return the living processes of this machine that belong to a launch, but this one."""
    mark = f"{LAUNCH_VARIABLE}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in path.read_bytes().split(b"\0"):
                process = identify(int(path.parent.name))
                if process is not None and process.pid != os.getpid():
                    found.append(process)
    return found
