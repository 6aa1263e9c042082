"""Which process is meant: a pid alone may be given to another one, so its start time goes along."""

from __future__ import annotations

import os
from pathlib import Path

import pydantic

# Positions after the command's name in /proc/PID/stat (proc_pid_stat(5): fields 3 and 22).
_STATE, _START_TIME = 0, 19


class ProcessIdentity(pydantic.BaseModel):
    """One process of this machine, past or present.

    Attributes:
        pid: Its process id.
        started: When it started, in clock ticks since the machine did.
    """

    model_config = pydantic.ConfigDict(frozen=True)

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether the process still runs; a zombie does not."""
        return identify(self.pid) == self


def identify(pid: int) -> ProcessIdentity | None:
    """The process that has a pid now, or None when there is none or it is a zombie."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = line.rpartition(")")[2].split()  # the name in parentheses may hold anything
    if fields[_STATE] in "ZX":
        return None
    return ProcessIdentity(pid=pid, started=int(fields[_START_TIME]))


def this_process() -> ProcessIdentity:
    """The process that asks."""
    identity = identify(os.getpid())
    assert identity is not None  # it runs
    return identity
