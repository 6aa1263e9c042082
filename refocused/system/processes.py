"""Starting a process that outlives its starter.

DeepSpeed's launcher ends a rank together with every descendant it has, in whatever session; only
a process whose parent has gone (parent 1) is none. So what is started here forks once, says the
child's pid on its stdout and ends; the child does the work.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import refocused

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
