"""Start processes that outlive their parent, and identify processes despite reused pids.

DeepSpeed's launcher kills a rank with all its descendants, in any session. A process whose parent
has exited is no longer a descendant, so a process started here forks, prints the child's pid and
exits; the child does the work.
"""

import json
import logging
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

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
Liveness = Literal["alive", "gone", "elsewhere"]


def session_record() -> dict[str, object]:
    """Return the entries of `state.json` that name the process which writes it."""
    me, launch = this_process(), os.environ.get(LAUNCH_VARIABLE)
    return {
        "pid": me.pid,  # of rank 0; of the supervisor until there is one
        "pid_started": me.started,  # clock ticks from the boot to its start
        "host": socket.gethostname(),  # its machine
        "supervisor": launch and json.loads(launch)["supervisor"],  # `pid` and `started`
    }


def liveness_of(state: Mapping[str, Any]) -> Liveness | None:
    """Return whether the process that wrote a `state.json` runs; None: it names no process."""
    if state.get("host", socket.gethostname()) != socket.gethostname():
        return "elsewhere"
    pid, started = state.get("pid"), state.get("pid_started")
    if not isinstance(pid, int) or not isinstance(started, int):
        return None
    return "alive" if ProcessIdentity(pid=pid, started=started).alive else "gone"


def is_running(state: Mapping[str, Any]) -> bool:
    """Return whether the session of a `state.json` starts, trains or may be restarted, here."""
    supervisor, status = state.get("supervisor"), state.get("status")
    if isinstance(supervisor, dict) and status != "finished":
        above = {**state, "pid": supervisor.get("pid"), "pid_started": supervisor.get("started")}
        if liveness_of(above) == "alive":
            return True
    return status in ("starting", "training") and liveness_of(state) == "alive"


START_TIMEOUT_SECONDS = 60.0
COMMAND_VARIABLE = "REFOCUSED_COMMAND"  # holds a shell command until the shell has read it


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


def run_shell(command: str, given: bytes, limit_seconds: float, **variables: str) -> str | None:
    """Run a shell command, with this on its standard input; return why it failed, else None.

    The command, which may hold a secret, is in no process's arguments, which every user can read.
    Its output is dropped. After `limit_seconds` all of its processes are killed.
    """
    with subprocess.Popen(
        f'command=${COMMAND_VARIABLE}; unset {COMMAND_VARIABLE}; eval "$command"',
        shell=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **variables, COMMAND_VARIABLE: command},
    ) as process:
        try:
            process.communicate(given, timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"the command took longer than {limit_seconds:g} s"
    return f"exit code {process.returncode}" if process.returncode else None


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
