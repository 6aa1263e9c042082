"""Commands that consist of verbs: finds the verb's module, reads its arguments, runs it."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence

from refocused.commands.arguments import Parser, is_another_rank, quiet_on_a_closed_pipe
from refocused.system.errors import ExitCode, RefocusedError

Verbs = Mapping[str, tuple[str, str]]


def run_verb(program: str, verbs: Verbs, argv: Sequence[str] | None) -> int:
    """Run the verb that the first argument names; return the exit code.

    A verb V is the functions `add_V_arguments(parser)` and `run_V(arguments)` of its module, which
    is imported only when it is wanted.

    Args:
        program: Name of the command, for its messages.
        verbs: For each verb the module below `refocused.commands`, and one line about it.
        argv: The command line without the program; None: that of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    with quiet_on_a_closed_pipe():
        if not given or given[0] in ("-h", "--help"):
            print(_help(program, verbs))
            return ExitCode.OK if given else ExitCode.WRONG_USE
        if given[0] in verbs:
            return run_one(f"{program} {given[0]}", given[0], *verbs[given[0]], given=given[1:])
    print(f"{program}: {given[0]!r} is no verb. There are: {', '.join(verbs)}.", file=sys.stderr)
    return ExitCode.WRONG_USE


def run_one(program: str, name: str, module: str, what: str, *, given: Sequence[str]) -> int:
    """Read a verb's arguments and run it; return the exit code.

    Args:
        program: As messages call the command.
        name: Of the verb's functions.
        module: That holds them, below `refocused.commands`.
        what: One line about it.
        given: Its arguments.
    """
    verb = importlib.import_module(f"refocused.commands.{module}")
    parser = Parser(prog=program, description=what)
    getattr(verb, f"add_{name}_arguments")(parser)
    arguments = parser.read(given)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        code: int = getattr(verb, f"run_{name}")(arguments)
    except RefocusedError as error:
        if not (error.on_every_rank and is_another_rank()):
            print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Interrupted. The same command goes on from here.", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return code


def _help(program: str, verbs: Verbs) -> str:
    lines = [f"usage: {program} VERB ...", ""]
    lines += [f"  {verb:<10} {what}" for verb, (_, what) in verbs.items()]
    return "\n".join([*lines, "", f"{program} VERB --help says more."])
