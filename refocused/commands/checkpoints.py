"""`launch/checkpoints.py`: the checkpoints of a run, on the disk and in the bucket."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence

from refocused.commands.arguments import Parser, quiet_on_a_closed_pipe
from refocused.errors import ExitCode, RefocusedError

# Each verb, the module that holds it, and one line about it.
VERBS = {
    "list": ("checkpoints_list", "show every step, newest first"),
    "info": ("checkpoints_info", "show all that is known about one step"),
    "verify": ("checkpoints_verify", "compare steps with their manifests"),
    "prune": ("checkpoints_prune", "remove old steps from the disk"),
    "compare": ("checkpoints_compare", "show how two steps differ"),
    "plot": ("checkpoints_plot", "draw the losses of a run"),
    "download": ("checkpoints_transfer", "fetch a step from the bucket, verified"),
    "upload": ("checkpoints_transfer", "complete in the bucket what a mirror did not"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb that the first argument names; return the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    with quiet_on_a_closed_pipe():
        if not given or given[0] in ("-h", "--help"):
            print(_help())
            return ExitCode.OK if given else ExitCode.WRONG_USE
        if given[0] in VERBS:
            return _run(given[0], given[1:])
    print(f"checkpoints: {given[0]!r} is no verb. There are: {', '.join(VERBS)}.", file=sys.stderr)
    return ExitCode.WRONG_USE


def _run(name: str, given: Sequence[str]) -> int:
    module, what = VERBS[name]
    verb = importlib.import_module(f"refocused.commands.{module}")
    parser = Parser(prog=f"checkpoints {name}", description=what)
    getattr(verb, f"add_{name}_arguments")(parser)
    arguments = parser.read(given)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        code: int = getattr(verb, f"run_{name}")(arguments)
    except RefocusedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Interrupted. The same command goes on from here.", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return code


def _help() -> str:
    lines = ["usage: checkpoints VERB ...", ""]
    lines += [f"  {verb:<10} {what}" for verb, (_, what) in VERBS.items()]
    return "\n".join([*lines, "", "checkpoints VERB --help says more."])
