"""The processes of one training that is to be killed: found by a mark in their environment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

MARK = "REFOCUSED_CHAOS"

SUPERVISOR, COMMAND, LAUNCHER = "supervisor", "command", "launcher"
RANK, MIRROR, SAMPLER, OTHER = "rank", "mirror", "sampler", "other"


@dataclasses.dataclass(frozen=True)
class Process:
    """One living process of a session."""

    pid: int  # its process id
    session: str  # what the mark says: which start it belongs to
    # `supervisor` (of launch/train.sh), `command` (`deepspeed`), `launcher` (DeepSpeed's inner
    # one), `rank`, `mirror`, `sampler` or `other`
    role: str


def living(mark: str) -> list[Process]:
    """Return every living process whose mark begins with a text; zombies are none."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            environment = (folder / "environ").read_bytes()
            if f"{MARK}={mark}".encode() not in environment:
                continue
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has ended meanwhile, or is another user's
        if state in "ZX":
            continue
        session = environment.partition(f"{MARK}=".encode())[2].partition(b"\0")[0].decode()
        found.append(Process(int(folder.name), session, _role(arguments)))
    return found


def kill(processes: Collection[Process]) -> None:
    """Kill processes at once; those that have ended are left alone."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], *, seconds: float, poll: float = 0.05) -> bool:
    """Wait until a condition is true; return whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll)
    return True


def _role(arguments: list[str]) -> str:
    """Tell what a process is by its command line."""
    if "refocused.checkpoints.mirror.mirror_process" in arguments:
        return MIRROR
    if "refocused.monitor.sampler.sampler_process" in arguments:
        return SAMPLER
    if "refocused.commands.launch" in arguments:
        return SUPERVISOR
    if "deepspeed.launcher.launch" in arguments:
        return LAUNCHER
    if any(Path(argument).name == "deepspeed" for argument in arguments):
        return COMMAND
    if any(argument.endswith("launch/train.py") for argument in arguments):
        return RANK
    return OTHER
