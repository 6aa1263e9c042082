"""`refocused COMMAND`, and the same commands for the scripts in `launch/`.

Imports the standard library alone: a script may start under a Python without the packages.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv"
SET_UP = ROOT / "launch" / "setup_environment.sh"
# Names the process that has already restarted; its id stays the same.
RESTARTED = "REFOCUSED_RESTARTED_PROCESS"
INTERRUPTED = 130  # as `ExitCode.INTERRUPTED`

COMMANDS = {
    "train": "train a run (started by deepspeed on several ranks)",
    "estimate_cost": "hours and dollars of a run: before, while and after it trains",
    "doctor": "look whether this machine can train a run",
    "prepare_data": "make, inspect, convert and move token files",
    "checkpoints": "show, check, move and compare a run's checkpoints",
    "generate": "continue prompts, or the lines read without one, with a model",
    "evaluate": "measure a model by tasks and texts, compare models",
    "monitor": "watch runs on a live screen, or print what is to be seen",
    "stop": "ask a run to save and stop, without a time limit",
}
# The module that holds each verb, and one line about it. "" is the command itself, without a verb.
# A command that is not listed here is a module of its own, with `main(argv)`.
VERBS = {
    "checkpoints": {
        "list": ("checkpoints.show", "show every step, newest first"),
        "info": ("checkpoints.show", "show all that is known about one step"),
        "verify": ("checkpoints.verify", "compare steps with their manifests"),
        "prune": ("checkpoints.prune", "remove old steps from the disk, or from the bucket"),
        "compare": ("checkpoints.show", "show how two steps differ"),
        "export": ("checkpoints.move", "write a step as a folder that transformers load"),
        "plot": ("checkpoints.show", "draw the losses of a run"),
        "download": ("checkpoints.move", "fetch a step from the bucket, verified"),
        "upload": ("checkpoints.move", "complete in the bucket what a mirror did not"),
    },
    "prepare_data": {
        "tokenize": ("prepare.make_shards", "make shards of .txt, .jsonl(.gz) and .parquet files"),
        "convert": ("prepare.make_shards", "make shards of other people's token files"),
        "split": ("prepare.token_files", "choose files for validation; copies nothing"),
        "inspect": ("prepare.token_files", "say what token files really hold"),
        "verify": ("prepare.token_files", "compare files with their manifest, or read them"),
        "manifest": ("prepare.token_files", "list the files with their tokens"),
        "recommend": ("prepare.recommend", "propose a model and a run for a data set"),
        "sync": ("prepare.token_files", "fetch a bucket's files to a folder; resumes after a kill"),
        "upload": ("prepare.token_files", "store a folder's files in a bucket, the manifest last"),
    },
    "evaluate": {
        "": ("evaluate.model", COMMANDS["evaluate"]),
        "compare": ("evaluate.compare", "compare models by tasks, or by their speed"),
        "spectrum": (
            "evaluate.compare",
            "show and draw how long a model without attention remembers",
        ),
    },
    **{one: {"": (one, COMMANDS[one])} for one in ("generate", "estimate_cost")},
    "stop": {"": ("monitor", COMMANDS["stop"])},
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
    return run_command(arguments[0], arguments[1:])


def run_command(name: str, given: Sequence[str]) -> int:
    """Run a command with its arguments; return its exit code."""
    if name not in VERBS:
        return int(importlib.import_module(f"refocused.commands.{name}").main(given))
    from refocused.commands.arguments import run_verb

    return run_verb(name, VERBS[name], given)


def run_script(name: str) -> NoReturn:
    """Run a command for its script in `launch/`, under a Python that has the packages."""
    _use_environment()
    code = run_command(name, sys.argv[1:])
    if code == INTERRUPTED:  # threads left behind inside C++ abort an ordinary exit now and then
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


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
