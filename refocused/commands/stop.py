"""`launch/stop.py`: ask a run to save and stop after the step it is in, or end it now."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from refocused.commands.arguments import Parser
from refocused.commands.run_selection import find_run
from refocused.metrics.jsonl import SmallFile, read_json, read_small
from refocused.system.errors import ConfigError, ExitCode
from refocused.system.processes import ProcessIdentity

POLL_SECONDS = 0.5


def build_parser() -> Parser:
    """Describe the command line."""
    parser = Parser(prog="stop", description="Ask a run to save and stop; no time limit.")
    add = parser.add_argument
    add("run", nargs="?", help="the run's folder, or its name in runs/ (default: the newest there)")
    add("--wait", action="store_true", help="return when the run has stopped")
    add(
        "--now",
        action="store_true",
        help="kill it without saving: what came after the last checkpoint is lost",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = build_parser().read(argv)
    try:
        folder = (
            find_run(arguments.run, option=None) if arguments.run else _newest_run(Path("runs"))
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    found = SmallFile() if folder is None else read_small(folder / "state.json")
    state = found.content
    if folder is None or state is None:
        print(_no_run(folder, found.trouble), file=sys.stderr)
        return ExitCode.WRONG_USE
    host = state.get("host", socket.gethostname())
    if host != socket.gethostname():
        return _ask_from_afar(folder, str(host), needs_process=arguments.now or arguments.wait)
    if not _alive(state):
        print(f"{folder}: the run is not running (status: {state.get('status')}).", file=sys.stderr)
        return ExitCode.FAILED
    (folder / "STOP").touch()  # also keeps a supervisor from starting it again
    if arguments.now:
        _kill(state)
        print(f"{folder}: killed, unsaved. Its launcher ends the other ranks within a minute.")
    else:
        print(f"{folder}: asked to stop; it saves after the step it is in.")
    while arguments.wait and _alive(read_json(folder / "state.json") or {}):
        time.sleep(POLL_SECONDS)
    return ExitCode.OK


def _ask_from_afar(folder: Path, host: str, *, needs_process: bool) -> int:
    """Leave a wish for a run of another machine, whose processes cannot be seen from here."""
    if needs_process:
        print(f"{folder}: it trains on {host}; --now and --wait work there.", file=sys.stderr)
        return ExitCode.WRONG_USE
    (folder / "STOP").touch()
    print(f"{folder}: if it still trains on {host}, it saves after the step it is in and stops.")
    return ExitCode.OK


def _kill(state: dict[str, object]) -> None:
    """Kill rank 0, without which the others cannot go on."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(_rank_0(state).pid, signal.SIGKILL)


def _newest_run(runs: Path) -> Path | None:
    states = sorted(runs.glob("*/state.json"), key=lambda path: path.stat().st_mtime)
    return states[-1].parent if states else None


def _no_run(folder: Path | None, trouble: str | None) -> str:
    if folder is None or trouble is None:
        return f"{folder or 'runs'}: no run with a state.json is there."
    return (
        f"{folder}/state.json cannot be read ({trouble}). If the run trains all the same, "
        f"`touch {folder}/STOP` lets it save and stop."
    )


def _alive(state: dict[str, object]) -> bool:
    """Whether the run still trains: its rank 0 lives and has not said that it ended."""
    return state.get("status") == "training" and _rank_0(state).alive


def _rank_0(state: dict[str, object]) -> ProcessIdentity:
    """Return the process that wrote the state; another one with its pid is not it."""
    return ProcessIdentity.model_validate(
        {"pid": state.get("pid", 0), "started": state.get("pid_started", 0)}
    )
