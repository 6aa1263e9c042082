"""Where a supervisor and the ranks that it started meet: a folder of that launch alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pydantic

from refocused.system.atomic_files import replace_file
from refocused.system.processes import (
    LAUNCH_VARIABLE,
    ProcessIdentity,
    identify,
    this_process,
)

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
