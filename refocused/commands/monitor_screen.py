"""The monitor in a `screen` session, beside a training that starts: `train.sh --monitor`."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

LONGEST_SECONDS = 10.0  # that `screen` may take to answer
NAME_LENGTH = 40  # of a run's, in its session's: the path of a socket has 107 characters at most


def open_in_screen(run: Path) -> str:
    """Open the monitor of a run in a session of its own; return what a person is to be told.

    The session is not of the launch: it outlives training, until somebody quits it, so that the
    end can be seen. A run that is started again finds its session.

    Args:
        run: The run's folder, which may not exist yet.
    """
    screen, name = shutil.which("screen"), session_name(run)
    if screen is None:
        return (
            "--monitor: screen is not installed (on Debian or Ubuntu: apt-get install screen), so "
            f"training goes on without it. In another terminal: python launch/monitor.py {run}"
        )
    attach = f"screen -U -r {name} shows {run} (Ctrl+A D leaves, q ends it)"
    watch = [sys.executable, "-P", "-m", "refocused.commands.monitor"]
    # Without -U and a terminal of 256 colours the curves and the colours break.
    opening = [screen, "-U", "-T", "screen-256color", "-dmS", name, *watch]
    try:
        listed = _ask([screen, "-ls", name])
        if re.search(rf"\.{re.escape(name)}\s", listed.stdout):
            return f"monitor  is there already: {attach}"
        # The session is one of UTF-8 (-U) whatever the locale of what starts it.
        environment = {**os.environ, "LC_ALL": "C.UTF-8"}
        opened = _ask([*opening, "--wait", str(run.absolute())], environment=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"--monitor: screen does not answer ({error}); training goes on without it."
    if opened.returncode:
        reason = " ".join((opened.stdout + opened.stderr).split()) or f"exit {opened.returncode}"
        return f"--monitor: screen refuses ({reason}); training goes on without it."
    return f"monitor  {attach}"


def session_name(run: Path) -> str:
    """Return the name of a run's session; `screen -r monitor` finds it where it is the only one.

    Runs of one name in several folders differ in its end, made of the whole path.
    """
    path = run.resolve()
    name = re.sub(r"[^A-Za-z0-9_-]", "_", path.name)[:NAME_LENGTH]
    return f"monitor-{name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:6]}"


def _ask(
    command: list[str], *, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )
