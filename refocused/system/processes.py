"""Start a process that outlives its starter, and recognize a process after its id was reused.

DeepSpeed's launcher ends a rank together with every descendant it has, in whatever session; only
a process whose parent has gone (parent 1) is none. So what is started here forks once, says the
child's pid on its stdout and ends; the child does the work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pydantic

import refocused

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


# Names, in its environment, the launch that a process belongs to and is ended with.
LAUNCH_VARIABLE = "REFOCUSED_LAUNCH"
LONGEST_START_SECONDS = 60.0


def start_detached(module: str, argument: str, *, log: Path) -> int:
    """Start `python -m MODULE ARGUMENT`, which calls `detach` first; wait until it has.

    It sees no GPU, belongs to no launch, whose supervisor would end it, and finds this package
    from any folder.

    Args:
        module: Full name of the module.
        argument: Given to it.
        log: Gets what it prints.

    Returns:
        Its process id.

    Raises:
        OSError: It could not be started, or its log not be written.
        subprocess.SubprocessError: It ended, or took too long, before it was detached.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        starter = subprocess.run(
            [sys.executable, "-P", "-m", module, argument],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            start_new_session=True,
            env=_detached_environment(),
            timeout=LONGEST_START_SECONDS,
            check=True,
        )
    return int(starter.stdout)


def detach() -> None:
    """Go on as an orphan of the lowest priority, with no stream of the starter's kept open."""
    child = os.fork()
    if child:
        os.write(sys.stdout.fileno(), str(child).encode())
        os._exit(0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.nice(19)


def _detached_environment() -> dict[str, str]:
    root = str(Path(refocused.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {name: value for name, value in os.environ.items() if name != LAUNCH_VARIABLE}
    return {**own, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
