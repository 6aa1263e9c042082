"""`refocused COMMAND`, and the same commands for the scripts in `launch/`.

Imports the standard library alone: a script may start under a Python without the packages.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv"
SET_UP = ROOT / "launch" / "setup_environment.sh"
# Names the process that has already restarted; its id stays the same.
RESTARTED = "REFOCUSED_RESTARTED_PROCESS"

COMMANDS = {
    "train": "train a run (started by deepspeed on several ranks)",
    "estimate_cost": "hours and dollars of a run: before, while and after it trains",
    "doctor": "look whether this machine can train a run",
    "prepare_data": "make, inspect, convert and move token files",
    "checkpoints": "show, check, move and compare a run's checkpoints",
    "generate": "write with a model: a step, a run, or a transformers folder",
    "evaluate": "measure a model by tasks and texts, compare models",
    "monitor": "watch runs on a live screen, or print what is to be seen",
    "stop": "ask a run to save and stop",
}


def main() -> int:
    """Run the command that the first argument names; return its exit code."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: refocused COMMAND ...\n")
        for name, what in COMMANDS.items():
            print(f"  {name:<12} {what}")
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(
            f"refocused: {arguments[0]!r} is not a command. There are: {', '.join(COMMANDS)}.",
            file=sys.stderr,
        )
        return 2
    module = importlib.import_module(f"refocused.commands.{arguments[0]}")
    code: int = module.main(arguments[1:])
    return code


def run_script(name: str) -> NoReturn:
    """Run a command for its script in `launch/`, under a Python that has the packages."""
    _use_environment()
    command = importlib.import_module(f"refocused.commands.{name}")
    sys.exit(command.main(sys.argv[1:]))


def missing_package() -> str | None:
    """Return the first of the dependencies in `pyproject.toml` that this Python lacks."""
    from importlib import metadata

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # tomllib is not in Python 3.10
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    for name in re.findall(r'^ *"([\w.-]+)', listed, re.MULTILINE):
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            return str(name)
    return None


def _use_environment() -> None:
    """Restart under the Python of `.venv` if this one lacks packages, or say how to get them.

    The restart keeps arguments, standard input, process id and exit code.
    """
    restarted = os.environ.pop(RESTARTED, None) == str(os.getpid())
    inside = ENVIRONMENT.is_dir() and ENVIRONMENT.samefile(sys.prefix)
    if inside and not restarted:
        return
    missing = missing_package()
    if missing is None:
        return
    python = ENVIRONMENT / "bin" / "python"
    if not restarted and os.access(python, os.X_OK):
        os.environ[RESTARTED] = str(os.getpid())
        typed = getattr(sys, "orig_argv", [sys.executable, *sys.argv])  # not in Python 3.9
        os.execv(python, [str(python), *typed[1:]])
    print(
        f"{sys.executable} lacks packages that refocused needs, for example {missing}. Install "
        f"them into .venv with: {SET_UP}",
        file=sys.stderr,
    )
    sys.exit(2)
