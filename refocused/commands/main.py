"""`refocused COMMAND`: the same commands as the scripts in `launch/`."""

from __future__ import annotations

import importlib
import sys

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
