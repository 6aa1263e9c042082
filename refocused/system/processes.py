"""Start processes that outlive their parent, and identify processes despite reused pids.

DeepSpeed's launcher kills a rank with all its descendants, in any session. A process whose parent
has exited is no longer a descendant, so a process started here forks, prints the child's pid and
exits; the child does the work.
"""

import logging
import os
import pkgutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pydantic

import refocused

# Positions after the command's name in /proc/PID/stat (proc_pid_stat(5): fields 3 and 22).
_STATE, _START_TIME = 0, 19


class ProcessIdentity(pydantic.BaseModel, frozen=True):
    """A process of this machine, running or ended."""

    pid: int
    started: int  # clock ticks since boot

    @property
    def alive(self) -> bool:
        """Whether the process still runs; False for a zombie."""
        return identify(self.pid) == self


def identify(pid: int) -> ProcessIdentity | None:
    """Return the process that has this pid now, or None if it is missing or a zombie."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = line.rpartition(")")[2].split()  # the name may itself contain parentheses
    if fields[_STATE] in "ZX":
        return None
    return ProcessIdentity(pid=pid, started=int(fields[_START_TIME]))


def this_process() -> ProcessIdentity:
    """Return the calling process."""
    identity = identify(os.getpid())
    assert identity is not None  # it runs
    return identity


# Environment variable of a launch's processes: its supervisor kills all that carry it.
LAUNCH_VARIABLE = "REFOCUSED_LAUNCH"
START_TIMEOUT_SECONDS = 60.0


def start_detached(
    function: str, argument: str, *, log: Path, secrets: Mapping[str, str | None] | None = None
) -> int:
    """Call a function, as `package.module:name`, with a text in a new process; return its pid.

    The process sees no GPU, belongs to no launch, and can import this package from any folder.
    Its output goes to `log`. `secrets` are added to its environment, which other users cannot
    read, unlike arguments.

    Raises:
        OSError: The process cannot be started, or the log cannot be written.
        subprocess.SubprocessError: It failed or timed out before it detached.
    """
    paths = [str(Path(refocused.__file__).parents[1]), os.environ.get("PYTHONPATH")]
    environment = {name: value for name, value in os.environ.items() if name != LAUNCH_VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment |= {name: value for name, value in (secrets or {}).items() if value is not None}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        starter = subprocess.run(
            [sys.executable, "-P", "-m", __name__, function, argument],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=file,
            start_new_session=True,
            env=environment,
            timeout=START_TIMEOUT_SECONDS,
            check=True,
        )
    return int(starter.stdout)


def _main(function: str, argument: str) -> int:
    """Continue in an orphaned child of lowest priority that keeps none of the parent's pipes."""
    child = os.fork()
    if child:
        os.write(sys.stdout.fileno(), str(child).encode())
        os._exit(0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.nice(19)
    # Imported after the fork, for which the parent waits.
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    try:
        pkgutil.resolve_name(function)(argument)
    except Exception:  # the edge of the process: who started it finds that it has ended
        logging.getLogger(__name__).exception("%s failed", function)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
