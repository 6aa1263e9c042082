"""`launch/monitor.py` and `launch/stop.py`: show runs, record a machine, stop a run."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import locale
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser, add_credentials, bucket_at
from refocused.commands.output import count, positive
from refocused.commands.run_selection import RUNS, find_run, whole_steps
from refocused.system.errors import ConfigError, RefocusedError, as_typed, how_to_install
from refocused.system.launchers import end_with_parent
from refocused.system.logs import print_message

if TYPE_CHECKING:
    from refocused.monitor.run_reader import RunReader

INTERVAL_SECONDS = 2.5
EVENTS_PRINTED = 5
SAMPLES = Path("samples")
SCREEN_SECONDS = 10.0  # time-out of a `screen` command
NAME_LENGTH = 40  # of a run in its session's name: the path of a socket has at most 107 characters
FORMS = ("once", "list", "json", "summary", "page", "collect", "web")
STOP_POLL_SECONDS = 0.5
WEB_PORT = 8765
SERVER = "REFOCUSED_WEB_SERVER"  # its process id, for what it starts


def run_monitor(parser: Parser) -> None:
    """Show runs, record a machine, or write a summary."""
    parser.description = (
        "Watch runs on a live screen. It only reads their files, so it cannot disturb training. "
        "With --collect, record the GPUs of a machine without a run."
    )
    parser.examples = ("demo", "--once --json runs/demo", "--list", "demo --web")
    runs = "folders, or names in runs/ (default: all there, newest first)"
    parser.add_argument("run", nargs="*", help=runs)
    add = parser.group("output")
    add("--interval SECONDS", "time between two readings", type=positive, default=INTERVAL_SECONDS)
    add("--page FILE", "write an HTML page that compares the named runs", type=Path)
    add("--once", "print the present state and exit")
    add("--list", "print a line for each run and exit")
    add("--wait", "accept a run that has not begun yet")
    add("--json", "print the present state as JSON and exit")
    add("--summary", "write SUMMARY.md and summary.html")
    add("--collect", f"record this machine until Ctrl+C, in RUN (default: {SAMPLES}/HOST)")
    add("--ascii", "only ASCII characters (default without a UTF-8 locale)")
    web = f"serve the live screen to browsers of this machine (default port: {WEB_PORT})"
    add("--web PORT", web, nargs="?", type=port, const=WEB_PORT)
    add = parser.group("storage")
    add("--bucket URL", "read the logs of all machines of the named runs there (checkpoint.mirror)")
    add_credentials(parser)
    arguments = parser.read()
    forms = [name for name in FORMS if getattr(arguments, name)]
    if len(forms) > 1 and set(forms) not in ({"once", "json"}, {"list", "json"}):
        parser.error(f"--{forms[0]} and --{forms[1]} exclude each other. Keep one")
    if SERVER in os.environ:  # the screen of one browser window
        end_with_parent(int(os.environ[SERVER]))
    for form in set(forms) - {"collect", "web"}:
        unused = ["interval"] if form in ("once", "list") else ["interval", "ascii"]
        parser.refuse(arguments, f"has no effect with --{form}", *unused)
    if not arguments.bucket:
        parser.refuse(arguments, "needs --bucket", "gcs_credentials", "gcp_project")
    if arguments.collect:
        parser.refuse(arguments, "has no effect with --collect", "bucket", "wait", "ascii")
    elif arguments.bucket and (not arguments.run or arguments.web):
        raise ConfigError("--bucket needs the name of a run, and --web cannot show it.")
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as copies:
        if arguments.collect:
            _collect(arguments.run, interval_seconds=arguments.interval)
            return
        if arguments.bucket:
            from refocused.checkpoints.mirror.mirror_logs import followed

            bucket = bucket_at(arguments.bucket, arguments)
            arguments.run = copies.enter_context(followed(bucket, arguments.run))
        _show(arguments)


def _show(arguments: argparse.Namespace) -> None:
    named = [find_run(run, must_exist=not arguments.wait, option=None) for run in arguments.run]
    all_runs = named or _runs_by_age()
    newest = named or all_runs[:1]
    ascii_only = arguments.ascii or not has_utf8_terminal(locale.getencoding(), os.environ)
    is_shown = sys.stdout.isatty() or arguments.web or "TEXTUAL_DRIVER" in os.environ
    if arguments.summary or arguments.page:
        _summarize(newest, arguments.page)
    elif arguments.list or arguments.json or arguments.once or not is_shown:
        shown_runs = all_runs if arguments.list else newest
        views = [_reader(folder).read(time.time()) for folder in shown_runs]
        if arguments.json:
            records = [view.as_record() for view in views]
            print(json.dumps(records[0] if len(records) == 1 else records, indent=1))
            return
        from rich.console import Console

        from refocused.monitor.screen.run_lines import all_lines, run_rows, shown

        rows = run_rows(views) if arguments.list else []
        for view in () if arguments.list else views:
            rows += all_lines(view, events=EVENTS_PRINTED)
        console = Console(highlight=False, soft_wrap=True)
        for line in shown(rows, ascii_only=ascii_only):
            console.print(line)
    elif arguments.web:
        _serve(all_runs, arguments)
    else:
        from refocused.monitor.screen.live_screen import Dashboard

        readers = [_reader(folder) for folder in all_runs]
        seconds = arguments.interval
        Dashboard(readers, interval_seconds=seconds, ascii_only=ascii_only).run()


def port(text: str) -> int:
    """Parse a port that a server may listen on."""
    number = count(text)
    if number >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r}: a port is from 1 to 65535")
    return number


def _runs_by_age() -> list[Path]:
    """Return the runs in runs/ that have a state, the last written first."""
    newest = find_run(None, option=None)
    states = sorted(RUNS.glob("*/state.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent for path in states] or [newest]


def _collect(named: Sequence[str], *, interval_seconds: float) -> None:
    from refocused.monitor.sampler.sampler import Sampler, take_turn
    from refocused.monitor.sampler.start_sampler import SamplerSettings

    if len(named) > 1:
        raise ConfigError(f"--collect takes one folder, not {len(named)}: {', '.join(named)}.")
    folder = find_run(named[0], must_exist=False) if named else SAMPLES / socket.gethostname()
    settings = SamplerSettings(
        run=folder.absolute(), training=None, interval_seconds=interval_seconds, ranks=0
    )
    samples = settings.log("gpu_metrics.jsonl")
    try:
        samples.parent.mkdir(parents=True, exist_ok=True)
        if not take_turn(settings):
            raise RefocusedError(
                f"Another process records this machine in {folder}. Choose another folder."
            )
        sampler = Sampler(settings)
    except OSError as error:
        raise RefocusedError(
            f"Cannot write to {folder} ({error.strerror}). Choose another folder."
        ) from error
    print_message(
        "hint",
        f"Recording to {samples} every {interval_seconds:g} s until Ctrl+C. "
        f"Watch it with: {as_typed('monitor')} {folder}",
    )
    sampler.run()


def _serve(folders: Sequence[Path], arguments: argparse.Namespace) -> None:
    try:
        from refocused.monitor.screen.web_server import MonitorServer
    except ImportError as error:
        fix = how_to_install("textual-serve")
        raise ConfigError(f"--web needs textual-serve. Install it: {fix}") from error
    show = [sys.executable, "-P", "-m", "refocused", "monitor", "--wait"]
    show += ["--interval", str(arguments.interval), *(["--ascii"] if arguments.ascii else [])]
    show += [str(folder.absolute()) for folder in folders]
    try:
        MonitorServer(f"{SERVER}=$PPID exec {shlex.join(show)}", port=arguments.web).serve()
    except OSError as error:
        raise RefocusedError(
            f"Port {arguments.web} cannot be used ({error.strerror}). Choose another: --web PORT"
        ) from error


def _summarize(folders: Sequence[Path], page: Path | None) -> None:
    from refocused.monitor.screen.summary import write_page, write_summary

    target, views = page, {folder: _reader(folder).read(time.time()) for folder in folders}
    try:
        if page is not None:
            print(write_page(views, page))
        for target, view in views.items() if page is None else ():
            print(", ".join(map(str, write_summary(target, view))))
    except OSError as error:
        raise RefocusedError(
            f"{target}: the summary cannot be written ({error.strerror}). Make room there, or name "
            "another place with --page."
        ) from error


def _reader(folder: Path) -> RunReader:
    from refocused.monitor.run_reader import RunReader

    return RunReader(folder, saved_steps=whole_steps)


def has_utf8_terminal(encoding: str, environment: Mapping[str, str]) -> bool:
    """Return whether the terminal probably shows UTF-8, by Python's encoding of the locale.

    In the C locale Python sets its own LC_CTYPE to UTF-8 (PEP 538), whatever the terminal supports:
    tmux then shows an underscore for each character of a curve.
    """
    if encoding.lower().replace("-", "") != "utf8":
        return False
    is_pythons_own = environment.get("LC_CTYPE") in ("C.UTF-8", "C.utf8", "UTF-8")
    has_language = environment.get("LANG", "") not in ("", "C", "POSIX")
    return bool(environment.get("LC_ALL")) or has_language or not is_pythons_own


def open_in_screen(run: Path) -> str:
    """Open the monitor of a run, which may not exist yet, in `screen`; return a line to print.

    The session outlives training, so that its end can be seen. A restarted run reuses its session.
    """
    screen, name = shutil.which("screen"), session_name(run)
    if screen is None:
        return (
            "--monitor: screen is not installed (on Debian or Ubuntu: apt-get install screen). "
            f"Training continues. Open it in another terminal: {as_typed('monitor')} {run}"
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

    attach = f"screen -U -r {name} shows {run} (Ctrl+A D detaches, q quits)"
    watch = [sys.executable, "-P", "-m", "refocused", "monitor"]
    # Curves and colours need -U, a terminal of 256 colours, and a UTF-8 locale, which the starting
    # process may not have.
    opening = ["-U", "-T", "screen-256color", "-dmS", name, *watch, "--wait", str(run.absolute())]
    try:
        if re.search(rf"\.{re.escape(name)}\s", call("-ls", name).stdout):
            return f"monitor  already open: {attach}"
        opened = call(*opening, LC_ALL="C.UTF-8")
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"--monitor: screen does not respond ({error}). Training continues."
    if opened.returncode:
        reason = " ".join((opened.stdout + opened.stderr).split()) or f"exit {opened.returncode}"
        return f"--monitor: screen failed ({reason}). Training continues."
    return f"monitor  {attach}"


def session_name(run: Path) -> str:
    """Return the name of a run's session, which ends with a hash of the run's path."""
    path = run.resolve()
    name = re.sub(r"[^A-Za-z0-9_-]", "_", path.name)[:NAME_LENGTH]
    return f"monitor-{name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:6]}"


def run_stop(parser: Parser) -> None:
    """Ask a run to save and stop after the step it is in, or end it now."""
    parser.examples = ("demo --wait",)
    run = "the run's folder, or its name in runs/ (default: the newest there)"
    parser.add_argument("run", nargs="?", help=run)
    add = parser.group("options")
    add("--wait", "return when the run has stopped")
    add("--now", "kill it without saving: everything since the last checkpoint is lost")
    arguments = parser.read()
    from refocused.metrics.jsonl import read_json, read_small
    from refocused.system.processes import is_running, liveness_of

    folder = find_run(arguments.run, option=None) if arguments.run else _runs_by_age()[0]
    state_file = read_small(folder / "state.json")
    state = state_file.content
    if state is None:
        raise ConfigError(
            f"{folder} has no state.json: no run has started there."
            if state_file.trouble is None
            else f"Cannot read {folder}/state.json ({state_file.trouble}). If the run is training, "
            f"`touch {folder}/STOP` makes it save and stop."
        )
    if liveness_of(state) == "elsewhere":
        host = state["host"]
        if arguments.now or arguments.wait:
            raise ConfigError(f"{folder} trains on {host}: use --now and --wait there.")
        (folder / "STOP").touch()
        print(f"{folder}: if it still trains on {host}, it will save after its step and stop.")
        return
    if not is_running(state):
        raise RefocusedError(f"{folder}: the run is not running (status: {state.get('status')}).")
    (folder / "STOP").touch()  # also keeps a supervisor from starting it again
    if arguments.now and liveness_of(state) == "alive":
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["pid"], signal.SIGKILL)  # rank 0, which the other ranks need
        print(f"{folder}: killed without saving. Its launcher ends the other ranks in a minute.")
    elif state.get("status") == "training":
        print(f"{folder}: stopping; it saves after its current step.")
    else:
        print(f"{folder}: stopping; it has not begun to train, and changes nothing.")
    while arguments.wait and is_running(read_json(folder / "state.json") or {}):
        time.sleep(STOP_POLL_SECONDS)
