"""`launch/stop.py`: ask a run to save its state and stop after the step it is in."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from refocused.commands.arguments import Parser
from refocused.errors import ExitCode

POLL_SECONDS = 0.5


def build_parser() -> Parser:
    """Describe the command line."""
    parser = Parser(prog="stop", description="Ask a run to save and stop; no time limit.")
    parser.add_argument("run", nargs="?", help="the run's folder (default: the newest in runs/)")
    parser.add_argument("--wait", action="store_true", help="return when the run has stopped")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = build_parser().read(argv)
    folder = Path(arguments.run) if arguments.run else _newest_run(Path("runs"))
    state = None if folder is None else _read_state(folder)
    if folder is None or state is None:
        print(f"{folder or 'runs'}: no run with a state.json is there.", file=sys.stderr)
        return ExitCode.WRONG_USE
    if not _alive(state):
        print(f"{folder}: the run is not running (status: {state['status']}).", file=sys.stderr)
        return ExitCode.FAILED
    (folder / "STOP").touch()
    print(f"{folder}: asked to stop; it saves after the step it is in.")
    while arguments.wait and _alive(_read_state(folder) or {}):
        time.sleep(POLL_SECONDS)
    return ExitCode.OK


def _newest_run(runs: Path) -> Path | None:
    states = sorted(runs.glob("*/state.json"), key=lambda path: path.stat().st_mtime)
    return states[-1].parent if states else None


def _read_state(folder: Path) -> dict[str, object] | None:
    try:
        state: dict[str, object] = json.loads((folder / "state.json").read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return state


def _alive(state: dict[str, object]) -> bool:
    """Whether the run still trains: its rank 0 lives and has not said that it ended."""
    pid = state.get("pid")
    if state.get("status") != "training" or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
