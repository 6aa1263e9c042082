"""`launch/monitor.py` and `launch/stop.py`: show runs, sample a machine, ask a run to stop."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import locale
import os
import re
import shutil
import signal
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
    from refocused.monitor.run_reader import RunReader
    from refocused.monitor.run_status import RunView

INTERVAL_SECONDS = 2.5
EVENTS_PRINTED = 5
SAMPLES = Path("samples")
SCREEN_SECONDS = 10.0  # that `screen` may take to answer
NAME_LENGTH = 40  # of a run's, in its session's: the path of a socket has 107 characters at most
STOP_POLL_SECONDS = 0.5


def build_parser() -> Parser:
    """Describe the command line."""
    parser = Parser(
        prog="monitor",
        description="Watch runs. It only reads their files: training never notices it. Or sample "
        "the GPUs of a machine that trains nothing of ours (--collect).",
    )
    add = parser.add_argument
    add("run", nargs="*", help="folders, or names in runs/ (default: all there, the newest first)")
    between = f"time between two looks ({INTERVAL_SECONDS:g})"
    add("--interval", type=positive, default=INTERVAL_SECONDS, metavar="SECONDS", help=between)
    for option, help in {
        "--once": "print the present state, and exit",
        "--list": "print a line for each run, and exit",
        "--wait": "accept a run that has not begun yet",
        "--json": "print it as JSON, and exit",
        "--summary": "write SUMMARY.md, summary.png and summary.html",
        "--collect": "write samples of this machine and its GPUs until Ctrl+C, to a folder of "
        f"runs/ or another (default: {SAMPLES}/HOST)",
        "--ascii": "only ASCII characters (as without a UTF-8 locale)",
    }.items():
        add(option, action="store_true", help=help)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = build_parser().read(argv)
    try:
        if arguments.collect:
            return _collect(arguments.run, interval_seconds=arguments.interval)
        folders = [_folder(name, must_exist=not arguments.wait) for name in arguments.run]
        is_named, folders = bool(folders), folders or _runs_by_age()
        with quiet_on_a_closed_pipe():
            if arguments.summary:
                return _summarize(folders if is_named else folders[:1])
            if arguments.list or arguments.json or arguments.once or not sys.stdout.isatty():
                return _print(folders if is_named or arguments.list else folders[:1], arguments)
        from refocused.monitor.screen.live_screen import Dashboard

        Dashboard(
            [_reader(folder) for folder in folders],
            interval_seconds=arguments.interval,
            ascii_only=_is_ascii_only(arguments),
        ).run()
    except RefocusedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        pass
    return ExitCode.OK


def _folder(name: str, *, must_exist: bool) -> Path:
    path = Path(name)
    if must_exist:
        return find_run(name, option=None)
    return path if path.is_dir() or len(path.parts) > 1 else RUNS / name


def _runs_by_age() -> list[Path]:
    """Return the runs below runs/ that have a state, the one that wrote it last at first."""
    newest = find_run(None, option=None)
    states = sorted(RUNS.glob("*/state.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent for path in states] or [newest]


def _collect(named: Sequence[str], *, interval_seconds: float) -> int:
    """Sample this machine, whatever runs on it, until Ctrl+C."""
    from refocused.monitor.sampler.sampler import Sampler, take_turn
    from refocused.monitor.sampler.start_sampler import SamplerSettings

    if len(named) > 1:
        raise ConfigError(f"--collect writes to one folder, not to {', '.join(named)}.")
    folder = find_run(named[0], must_exist=False) if named else SAMPLES / socket.gethostname()
    settings = SamplerSettings(
        run=folder, training=None, interval_seconds=interval_seconds, ranks=0
    )
    samples = settings.log("gpu_metrics.jsonl")
    try:
        samples.parent.mkdir(parents=True, exist_ok=True)
        if not take_turn(settings):
            raise RefocusedError(
                f"{folder}: another process samples this machine into it. Name another folder."
            )
        sampler = Sampler(settings)
    except OSError as error:
        raise RefocusedError(
            f"{folder} cannot be written: {error.strerror}. Name another."
        ) from error
    print(
        f"{samples}: a sample every {interval_seconds:g} s until Ctrl+C. "
        f"See them: python launch/monitor.py {folder}",
        file=sys.stderr,
    )
    sampler.run()
    return ExitCode.OK


def _summarize(folders: Sequence[Path]) -> int:
    from refocused.monitor.screen.summary import write_summary

    now = time.time()
    for folder in folders:
        try:
            files = write_summary(folder, _view(folder, now), now=now)
        except OSError as error:
            raise RefocusedError(
                f"{folder}: its summary cannot be written ({error.strerror}). Make room there."
            ) from error
        print(", ".join(map(str, files)))
    return ExitCode.OK


def _print(folders: Sequence[Path], arguments: argparse.Namespace) -> int:
    now = time.time()
    views = [_view(folder, now) for folder in folders]
    if arguments.json:
        records = [view.as_record() for view in views]
        print(json.dumps(records[0] if len(records) == 1 else records, indent=1))
        return ExitCode.OK
    from rich.console import Console

    from refocused.monitor.screen.run_lines import all_lines, run_rows, shown

    lines = run_rows(views) if arguments.list else []
    if not arguments.list:
        lines = [line for view in views for line in all_lines(view, now=now, events=EVENTS_PRINTED)]
    console = Console(highlight=False, soft_wrap=True)
    for line in shown(lines, ascii_only=_is_ascii_only(arguments)):
        console.print(line)
    return ExitCode.OK


def _reader(folder: Path) -> RunReader:
    from refocused.monitor.run_reader import RunReader

    return RunReader(folder, saved_steps=whole_steps)


def _view(folder: Path, now: float) -> RunView:
    from refocused.monitor.run_status import view_of

    return view_of(_reader(folder).read(), now=now)


def _is_ascii_only(arguments: argparse.Namespace) -> bool:
    return arguments.ascii or not has_utf8_terminal(locale.getencoding(), os.environ)


def has_utf8_terminal(encoding: str, environment: Mapping[str, str]) -> bool:
    """Return whether the terminal probably shows UTF-8, by the locale's encoding in Python.

    In the C locale Python sets LC_CTYPE to UTF-8 for itself (PEP 538), which says nothing about
    the terminal: tmux then shows an underscore for each character of a curve.
    """
    if encoding.lower().replace("-", "") != "utf8":
        return False
    is_pythons_own = environment.get("LC_CTYPE") in ("C.UTF-8", "C.utf8", "UTF-8")
    has_language = environment.get("LANG", "") not in ("", "C", "POSIX")
    return bool(environment.get("LC_ALL")) or has_language or not is_pythons_own


def open_in_screen(run: Path) -> str:
    """Open the monitor of a run, which may not exist yet, in `screen`; return what to print.

    The session outlives training, so that its end can be seen; a run that is started again finds
    its session.
    """
    screen, name = shutil.which("screen"), session_name(run)
    if screen is None:
        return (
            "--monitor: screen is not installed (on Debian or Ubuntu: apt-get install screen), so "
            f"training goes on without it. In another terminal: python launch/monitor.py {run}"
        )

    def call(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [screen, *arguments],
            env={**os.environ, **changes},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCREEN_SECONDS,
            check=False,
        )

    attach = f"screen -U -r {name} shows {run} (Ctrl+A D leaves, q ends it)"
    watch = [sys.executable, "-P", "-m", "refocused.commands.monitor"]
    # Without -U and a terminal of 256 colours the curves and the colours break, and the locale of
    # what starts the session may be another.
    opening = ["-U", "-T", "screen-256color", "-dmS", name, *watch, "--wait", str(run.absolute())]
    try:
        if re.search(rf"\.{re.escape(name)}\s", call("-ls", name).stdout):
            return f"monitor  is there already: {attach}"
        opened = call(*opening, LC_ALL="C.UTF-8")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"--monitor: screen does not answer ({error}); training goes on without it."
    if opened.returncode:
        reason = " ".join((opened.stdout + opened.stderr).split()) or f"exit {opened.returncode}"
        return f"--monitor: screen refuses ({reason}); training goes on without it."
    return f"monitor  {attach}"


def session_name(run: Path) -> str:
    """Return the name of a run's session, which ends in a hash of the path."""
    path = run.resolve()
    name = re.sub(r"[^A-Za-z0-9_-]", "_", path.name)[:NAME_LENGTH]
    return f"monitor-{name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:6]}"


def run_stop(parser: Parser) -> int:
    """Ask a run to save and stop after the step it is in, or end it now."""
    add = parser.add_argument
    add("run", nargs="?", help="the run's folder, or its name in runs/ (default: the newest there)")
    add("--wait", action="store_true", help="return when the run has stopped")
    lost = "kill it without saving: everything since the last checkpoint is lost"
    add("--now", action="store_true", help=lost)
    arguments = parser.read()
    from refocused.metrics.jsonl import read_json, read_small
    from refocused.monitor.run_reader import liveness_of

    folder = find_run(arguments.run, option=None) if arguments.run else _runs_by_age()[0]
    found = read_small(folder / "state.json")
    state = found.content
    if state is None:
        raise ConfigError(
            f"{folder}: no run with a state.json is there."
            if found.trouble is None
            else f"{folder}/state.json cannot be read ({found.trouble}). If the run trains all the "
            f"same, `touch {folder}/STOP` lets it save and stop."
        )
    if liveness_of(state) == "elsewhere":
        host = state["host"]
        if arguments.now or arguments.wait:
            raise ConfigError(f"{folder}: it trains on {host}; --now and --wait work there.")
        (folder / "STOP").touch()
        print(f"{folder}: if it still trains on {host}, it saves after its current step and stops.")
        return ExitCode.OK
    if not _trains(state):
        print(f"{folder}: the run is not running (status: {state.get('status')}).", file=sys.stderr)
        return ExitCode.FAILED
    (folder / "STOP").touch()  # also keeps a supervisor from starting it again
    if arguments.now:
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["pid"], signal.SIGKILL)  # rank 0, without which the others cannot go on
        print(f"{folder}: killed without saving. Its launcher ends the other ranks in a minute.")
    else:
        print(f"{folder}: asked to stop; it saves after its current step.")
    while arguments.wait and _trains(read_json(folder / "state.json") or {}):
        time.sleep(STOP_POLL_SECONDS)
    return ExitCode.OK


def _trains(state: Mapping[str, Any]) -> bool:
    from refocused.monitor.run_reader import liveness_of

    return state.get("status") == "training" and liveness_of(state) == "alive"


if __name__ == "__main__":
    sys.exit(main())
