"""`launch/prepare_data.py`: makes shards of text and of other people's token files, and more."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence

from refocused.commands.arguments import Parser, quiet_on_a_closed_pipe
from refocused.errors import ExitCode, RefocusedError

# Each verb, the module that holds it, and one line about it.
VERBS = {
    "tokenize": ("prepare_tokenize", "make shards of .txt, .jsonl(.gz) and .parquet files"),
    "convert": ("prepare_convert", "make shards of other people's token files"),
    "split": ("prepare_convert", "choose files for validation; copies nothing"),
    "inspect": ("prepare_inspect", "say what token files really hold"),
    "verify": ("prepare_verify", "compare files with their manifest, or read them"),
    "manifest": ("prepare_verify", "list the files with their tokens"),
    "recommend": ("prepare_recommend", "propose a model and a run for a data set"),
    "sync": ("prepare_transfer", "fetch a bucket's files to a folder, and go on after a kill"),
    "upload": ("prepare_transfer", "store a folder's files in a bucket, the manifest last"),
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
    print(f"prepare_data: {given[0]!r} is no verb. There are: {', '.join(VERBS)}.", file=sys.stderr)
    return ExitCode.WRONG_USE


def _run(name: str, given: Sequence[str]) -> int:
    module, what = VERBS[name]
    verb = importlib.import_module(f"refocused.commands.{module}")
    parser = Parser(prog=f"prepare_data {name}", description=what)
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
    lines = ["usage: prepare_data VERB ...", ""]
    lines += [f"  {verb:<10} {what}" for verb, (_, what) in VERBS.items()]
    return "\n".join([*lines, "", "prepare_data VERB --help says more."])
