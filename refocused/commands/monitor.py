"""`launch/monitor.py`: show runs live, print or summarize them; sample a machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import locale
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser, quiet_on_a_closed_pipe
from refocused.commands.output import positive
from refocused.commands.run_selection import RUNS, find_run, whole_steps
from refocused.system.errors import ConfigError, ExitCode, RefocusedError

if TYPE_CHECKING:
    from refocused.monitor.run_reader import RunFollower
    from refocused.monitor.run_status import Liveness, RunView


INTERVAL_SECONDS = 2.5
EVENTS_PRINTED = 5
SAMPLES = Path("samples")


def build_parser() -> Parser:
    """Describe the command line."""
    parser = Parser(
        prog="monitor",
        description="Watch runs. It only reads their files: training never notices it. Or sample "
        "the GPUs of a machine that trains nothing of ours (--collect).",
    )
    add = parser.add_argument
    add("run", nargs="*", help="folders, or names in runs/ (default: all there, the newest first)")
    add(
        "--interval",
        type=positive,
        default=INTERVAL_SECONDS,
        metavar="SECONDS",
        help=f"time between two looks ({INTERVAL_SECONDS:g})",
    )
    add("--once", action="store_true", help="print what is to be seen now, and end")
    add("--list", action="store_true", help="print a line for each run, and end")
    add("--wait", action="store_true", help="the run named may not have begun yet")
    add("--json", action="store_true", help="print it as JSON, and end")
    add("--summary", action="store_true", help="write SUMMARY.md, summary.png and summary.html")
    add(
        "--collect",
        action="store_true",
        help=f"write samples of this machine and its GPUs until Ctrl+C, to a folder of runs/ or "
        f"another (default: {SAMPLES}/HOST)",
    )
    add("--ascii", action="store_true", help="only ASCII characters (as without a UTF-8 locale)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = build_parser().read(argv)
    if arguments.collect:
        return _collect(arguments.run, interval_seconds=arguments.interval)
    try:
        folders = [
            _awaited(name) if arguments.wait else find_run(name, option=None)
            for name in arguments.run
        ] or runs_by_age()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    named = bool(arguments.run)
    ascii_only = arguments.ascii or not speaks_utf8(locale.getencoding(), os.environ)
    try:
        with quiet_on_a_closed_pipe():
            if arguments.summary:
                return _summarize(folders if named else folders[:1])
            if arguments.list or arguments.json or arguments.once or not sys.stdout.isatty():
                shown = folders if named or arguments.list else folders[:1]
                return _print(
                    [_follower(folder) for folder in shown],
                    form="json" if arguments.json else "list" if arguments.list else "text",
                    ascii_only=ascii_only,
                )
        return _watch(folders, interval_seconds=arguments.interval, ascii_only=ascii_only)
    except RefocusedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.OK


def runs_by_age() -> list[Path]:
    """Return the runs below runs/, the one that wrote its state last at first.

    Raises:
        ConfigError: There is none.
    """
    newest = find_run(None, option=None)  # refuses when there is none
    states = [path / "state.json" for path in RUNS.iterdir() if (path / "state.json").is_file()]
    found = [path.parent for path in sorted(states, key=_changed, reverse=True)]
    return found or [newest]


def _watch(folders: Sequence[Path], *, interval_seconds: float, ascii_only: bool) -> int:
    from refocused.monitor.screen.live_screen import Dashboard

    Dashboard(
        [_follower(folder) for folder in folders],
        interval_seconds=interval_seconds,
        ascii_only=ascii_only,
    ).run()
    return ExitCode.OK


def _collect(named: Sequence[str], *, interval_seconds: float) -> int:
    """Sample this machine beside whatever runs on it."""
    from refocused.monitor.sampler.sampler import Sampler, take_turn
    from refocused.monitor.sampler.start_sampler import SamplerSettings

    if len(named) > 1:
        print(f"--collect writes to one folder, not to {', '.join(named)}.", file=sys.stderr)
        return ExitCode.WRONG_USE
    folder = find_run(named[0], must_exist=False) if named else SAMPLES / socket.gethostname()
    settings = SamplerSettings(
        run=folder, training=None, interval_seconds=interval_seconds, ranks=0
    )
    try:
        settings.samples.parent.mkdir(parents=True, exist_ok=True)
        if not take_turn(settings):
            print(
                f"{folder}: another process samples this machine into it. Name another folder.",
                file=sys.stderr,
            )
            return ExitCode.FAILED
        sampler = Sampler(settings)
    except OSError as error:
        print(f"{folder} cannot be written: {error.strerror}. Name another.", file=sys.stderr)
        return ExitCode.FAILED
    print(
        f"{settings.samples}: a sample every {interval_seconds:g} s until Ctrl+C. "
        f"See them: python launch/monitor.py {folder}",
        file=sys.stderr,
    )
    with contextlib.suppress(KeyboardInterrupt):
        sampler.run()
    return ExitCode.OK


def _summarize(folders: Sequence[Path]) -> int:
    from refocused.monitor.screen.summary import write_summary

    now = time.time()
    for folder in folders:
        try:
            files = write_summary(folder, _follower(folder).view(now=now), now=now)
        except OSError as error:
            raise RefocusedError(
                f"{folder}: its summary cannot be written ({error.strerror}). Make room there."
            ) from error
        print(", ".join(str(file) for file in files))
    return ExitCode.OK


def _print(followers: Sequence[RunFollower], *, form: str, ascii_only: bool) -> int:
    now = time.time()
    views = [follower.view(now=now) for follower in followers]
    if form == "json":
        records = [view.as_record() for view in views]
        print(json.dumps(records[0] if len(records) == 1 else records, indent=1))
        return ExitCode.OK
    _print_lines(views, now=now, form=form, ascii_only=ascii_only)
    return ExitCode.OK


def _print_lines(views: Sequence[RunView], *, now: float, form: str, ascii_only: bool) -> None:
    from rich.console import Console

    from refocused.monitor.screen.run_lines import all_lines, run_rows, shown

    console = Console(highlight=False, soft_wrap=True)
    lines = run_rows(views) if form == "list" else []
    if form == "text":
        lines = [line for view in views for line in all_lines(view, now=now, events=EVENTS_PRINTED)]
    for line in shown(lines, ascii_only=ascii_only):
        console.print(line)


def _follower(folder: Path) -> RunFollower:
    from refocused.monitor.run_reader import RunFollower

    return RunFollower(folder, liveness=liveness, saved_steps=whole_steps)


def liveness(state: Mapping[str, Any]) -> Liveness | None:
    """Say whether the process that wrote a state is there; None: it does not say who it is."""
    from refocused.system.processes import ProcessIdentity

    if state.get("host", socket.gethostname()) != socket.gethostname():
        return "elsewhere"
    pid, started = state.get("pid"), state.get("pid_started")
    if not isinstance(pid, int) or not isinstance(started, int):
        return None
    return "alive" if ProcessIdentity(pid=pid, started=started).alive else "gone"


def _awaited(name: str) -> Path:
    """Return the folder that a run has or will have."""
    path = Path(name)
    return path if path.is_dir() or len(path.parts) > 1 else RUNS / name


def speaks_utf8(encoding: str, environment: Mapping[str, str]) -> bool:
    """Whether the terminal is to be taken for one of UTF-8.

    In the C locale Python sets LC_CTYPE to UTF-8 for itself (PEP 538), which says nothing of the
    terminal: tmux shows an underscore for each sign of a curve there.

    Args:
        encoding: Of the locale, as Python has it.
        environment: Of this process.
    """
    if encoding.lower().replace("-", "") != "utf8":
        return False
    if environment.get("LC_ALL"):
        return True
    is_pythons_own = environment.get("LC_CTYPE") in ("C.UTF-8", "C.utf8", "UTF-8")
    return not (is_pythons_own and environment.get("LANG", "") in ("", "C", "POSIX"))


def _changed(file: Path) -> float:
    return file.stat().st_mtime


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


if __name__ == "__main__":
    sys.exit(main())
