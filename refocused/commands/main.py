"""The console command `refocused COMMAND`, and the scripts of `launch/`.

Imports only the standard library: a script may start under a Python without the packages.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv"
SET_UP = ROOT / "launch" / "setup_environment.sh"
# Holds the id of the process that has restarted already; a restart keeps the id.
RESTARTED = "REFOCUSED_RESTARTED_PROCESS"
INTERRUPTED = 130  # as `ExitCode.INTERRUPTED`
SHELLS = ("bash", "zsh", "fish")

COMMANDS = {
    "speedrun": "from raw text to a scored, exported model, in one command",
    "launch": "train on all GPUs of this machine, under a supervisor",
    "train": "train as one process, or as one rank of a launcher",
    "init": "plan a run for your data and GPUs and write its file, or copy one",
    "estimate_cost": "estimate the hours and dollars of a run, or print those of one",
    "doctor": "check whether this machine can train a run",
    "prepare_data": "tokenize, convert, inspect and move token files",
    "checkpoints": "list, verify, move, compare and export a run's checkpoints",
    "generate": "generate text from a checkpoint",
    "evaluate": "score a checkpoint on tasks and texts, or compare models",
    "monitor": "watch runs on a live screen, or print their state",
    "compare": "compare runs: settings, losses, scores, speed and cost",
    "stop": "save a run's state and stop it, without a time limit",
}
# The module of each verb and its line of help. "" is the command itself, without a verb. A command
# that is not listed here is a module of its own, with `build_parser()` and `main(argv)`.
VERBS = {
    "checkpoints": {
        "list": ("checkpoints.show", "list a run's checkpoints, newest first"),
        "info": ("checkpoints.show", "show everything that is known about one checkpoint"),
        "verify": ("checkpoints.show", "compare checkpoints with their manifests"),
        "prune": ("checkpoints.prune", "remove old checkpoints from the disk or the bucket"),
        "compare": ("checkpoints.show", "show how two checkpoints differ"),
        "export": ("checkpoints.move", "export a checkpoint as a transformers folder"),
        "plot": ("checkpoints.show", "draw the losses of a run"),
        "download": ("checkpoints.move", "download a checkpoint from the bucket and verify it"),
        "upload": ("checkpoints.move", "upload what the mirror left unfinished"),
    },
    "prepare_data": {
        "tokenize": ("prepare_data", "tokenize texts: .txt, .jsonl, .parquet and others"),
        "convert": ("prepare_data", "convert token files of other formats to shards"),
        "train-tokenizer": ("prepare_data", "train a byte-pair encoding on texts"),
        "docstrings": ("prepare_data", "collect text that every machine has"),
        "split": ("prepare_data", "choose files for validation; copies nothing"),
        "inspect": ("prepare_data", "show what token files hold"),
        "verify": ("prepare_data", "compare files with their manifest, or read them all"),
        "manifest": ("prepare_data", "write a manifest of the files and their tokens"),
        "sync": ("prepare_data", "download a bucket's files to a folder; resumable"),
        "upload": ("prepare_data", "upload a folder's files to a bucket, the manifest last"),
    },
    "evaluate": {
        "": ("evaluate", COMMANDS["evaluate"]),
        "compare": ("evaluate", "compare models, or a run's checkpoints, by tasks"),
    },
    **{
        name: {"": (name, COMMANDS[name])}
        for name in ("init", "doctor", "generate", "estimate_cost")
    },
    "speedrun": {"": ("speedrun.command", COMMANDS["speedrun"])},
    "monitor": {"": ("monitor", COMMANDS["monitor"])},
    "compare": {"": ("monitor", COMMANDS["compare"])},
    "stop": {"": ("monitor", COMMANDS["stop"])},
}
HELP = f"""usage: refocused COMMAND [options]

Pre-train language models of about one billion parameters with DeepSpeed ZeRO-3.

commands:
{{commands}}

options:
  --version             print the version
  --completion SHELL    print the completion script for {", ".join(SHELLS)}

Options of a command: refocused COMMAND --help
Example: refocused launch --config demo"""


def main() -> int:
    """Run the command that the first argument names; return its exit code."""
    arguments = sys.argv[1:]
    if arguments and arguments[0].startswith("--local_rank="):  # DeepSpeed puts it first
        arguments.append(arguments.pop(0))
    first = arguments[0] if arguments else ""
    name = first.replace("-", "_")
    if first in ("", "-h", "--help"):
        commands = "\n".join(f"  {name:<14} {what}" for name, what in COMMANDS.items())
        print(HELP.format(commands=commands))
        return 0 if first else 2
    if first == "--version":
        print(f"refocused {importlib.import_module('refocused').__version__}")
        return 0
    try:
        if first == "--completion" and arguments[1:] and arguments[1] in SHELLS:
            print(_completion(arguments[1]))
            return 0
        if name in COMMANDS:
            return _safe_exit(run_command(name, arguments[1:]))
    except ModuleNotFoundError:
        if (missing := missing_package()) is None:
            raise
        fix = SET_UP if SET_UP.is_file() else f"{sys.executable} -m pip install {missing}"
        print(f"error: {sys.executable} lacks {missing}. Install it: {fix}", file=sys.stderr)
        return 2
    what = f"option {' '.join(arguments)!r}" if first.startswith("-") else f"command {first!r}"
    from refocused.system.errors import did_you_mean

    print(f"error: unknown {what}.{did_you_mean(name, COMMANDS)}", file=sys.stderr)
    print("hint: refocused --help lists the commands.", file=sys.stderr)
    return 2


def _completion(shell: str) -> str:
    """Return the completion script of a shell, with all commands, verbs, options and runs."""
    import shtab

    from refocused.config import shipped_files

    runs = " ".join(sorted(file.stem for file in (shipped_files() / "runs").glob("*.yaml")))
    run_file = {
        "bash": "_refocused_runs",
        "zsh": "_refocused_runs",
        "fish": f"{runs} {shtab.FILE['fish']}",
        "preamble": {
            "bash": f'_refocused_runs() {{ compgen -W "{runs}" -- "$1"; compgen -f -- "$1"; }}',
            "zsh": f"_refocused_runs() {{ compadd {runs}; _files }}",
        },
    }
    top = argparse.ArgumentParser(prog="refocused")
    top.add_argument("--version", action="store_true", help="print the version")
    top.add_argument("--completion", choices=SHELLS, help="print a completion script")
    for action in (action for parser in _add_parsers(top) for action in parser._actions):
        if action.dest == "config":
            action.complete = run_file  # type: ignore[attr-defined]
        elif action.choices is None and action.nargs != 0:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(top, shell)


def _add_parsers(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Add a parser for each command and each verb; yield those with options."""
    from refocused.commands.arguments import Parser

    class OptionsAddedError(Exception):
        """Raised where a verb would read its command line."""

    class Description(Parser):
        def read(self, argv: Sequence[str] | None = None) -> NoReturn:
            raise OptionsAddedError

    commands = top.add_subparsers(parser_class=Description)
    for name, what in COMMANDS.items():
        if name not in VERBS:
            modules = ("launch", "train") if name == "launch" else (name,)
            parents = [_module(module).build_parser() for module in modules]
            yield commands.add_parser(
                name, help=what, parents=parents, add_help=False, conflict_handler="resolve"
            )
            continue
        command = commands.add_parser(name, help=what)
        verbs = command.add_subparsers() if set(VERBS[name]) != {""} else None
        for verb, (module, line) in VERBS[name].items():
            parser = verbs.add_parser(verb, help=line) if verb and verbs else command
            with contextlib.suppress(OptionsAddedError):
                getattr(_module(module), f"run_{verb or name}".replace("-", "_"))(parser)
            yield parser


def _module(name: str) -> Any:
    return importlib.import_module(f"refocused.commands.{name}")


def run_command(name: str, given: Sequence[str]) -> int:
    """Run a command with its arguments; return its exit code."""
    # Generated text, and names of files, may have characters that this output cannot show.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if name == "train":
            importlib.import_module("refocused.system.launchers").start_as_rank()
        if name in VERBS:
            return int(_module("arguments").run_verb(name, VERBS[name], given))
        return int(_module(name).main(given))
    except KeyboardInterrupt:
        print("Interrupted. Run the same command again.", file=sys.stderr)
        return INTERRUPTED


def run_script(name: str) -> NoReturn:
    """Run a command for its script in `launch/`, under a Python that has the packages.

    If this Python lacks some, the process restarts under that of `.venv`, which keeps arguments,
    standard input, process id and exit code. Without a usable `.venv` it exits, with the command
    that makes one.
    """
    restarted = os.environ.pop(RESTARTED, None) == str(os.getpid())
    inside = ENVIRONMENT.is_dir() and ENVIRONMENT.samefile(sys.prefix)
    missing = None if inside and not restarted else missing_package()
    if missing is None:
        sys.exit(_safe_exit(run_command(name, sys.argv[1:])))
    python = ENVIRONMENT / "bin" / "python"
    if not restarted and os.access(python, os.X_OK):
        os.environ[RESTARTED] = str(os.getpid())
        typed = getattr(sys, "orig_argv", [sys.executable, *sys.argv])  # not in Python 3.9
        os.execv(python, [str(python), *typed[1:]])
    print(
        f"error: {sys.executable} lacks packages that refocused needs, for example {missing}.\n"
        f"hint: Install them into .venv with: {SET_UP}",
        file=sys.stderr,
    )
    sys.exit(2)


def _safe_exit(code: int) -> int:
    """Return an exit code, or exit at once after an interrupt."""
    if code == INTERRUPTED:  # threads left behind inside C++ sometimes abort a normal exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def missing_package() -> str | None:
    """Return the first dependency that this Python lacks; None if it has all of them."""
    from importlib import metadata

    if SET_UP.is_file():  # a checkout; tomllib is not in Python 3.10
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        (text,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
        required = re.findall(r'^ *"([^"]+)', text, re.MULTILINE)
    else:
        required = [
            requirement
            for requirement in metadata.requires("refocused") or []
            if "extra ==" not in requirement
        ]
    for name in (re.split(r"[^\w.-]", requirement)[0] for requirement in required):
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            return name
    return None
