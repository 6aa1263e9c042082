"""Start a process that outlives its starter, and recognize a process after its id was reused.

DeepSpeed's launcher ends a rank together with every descendant it has, in whatever session; only
a process whose parent has gone (parent 1) is none. So what is started here forks once, prints the
child's pid and exits; the child does the work.
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
    """One process of this machine, past or present."""

    model_config = pydantic.ConfigDict(frozen=True)

    pid: int
    started: int  # in clock ticks since the machine started

    @property
    def alive(self) -> bool:
        """Whether the process still runs; a zombie does not."""
        return identify(self.pid) == self


def identify(pid: int) -> ProcessIdentity | None:
    """Return the process that has a pid now; None when there is none or it is a zombie."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = line.rpartition(")")[2].split()  # the name in parentheses may hold anything
    if fields[_STATE] in "ZX":
        return None
    return ProcessIdentity(pid=pid, started=int(fields[_START_TIME]))


def this_process() -> ProcessIdentity:
    """Return the process that calls this."""
    identity = identify(os.getpid())
    assert identity is not None  # it runs
    return identity


# Names, in its environment, the launch that a process belongs to and is ended with.
LAUNCH_VARIABLE = "REFOCUSED_LAUNCH"
LONGEST_START_SECONDS = 60.0


def start_detached(module: str, argument: str, *, log: Path) -> int:
    """Start `python -m MODULE ARGUMENT`, which calls `detach` first; return its process id.

    It sees no GPU, belongs to no launch, whose supervisor would end it, and finds this package
    from any folder. What it prints goes to `log`.

    Raises:
        OSError: It could not be started, or its log not be written.
        subprocess.SubprocessError: It ended, or took too long, before it was detached.
    """
    paths = [str(Path(refocused.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    environment = {name: value for name, value in os.environ.items() if name != LAUNCH_VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["CUDA_VISIBLE_DEVICES"] = ""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        starter = subprocess.run(
            [sys.executable, "-P", "-m", module, argument],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            start_new_session=True,
            env=environment,
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
