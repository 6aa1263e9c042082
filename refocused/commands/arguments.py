"""How commands read their command lines: verbs, shared options, and exit code 2 for a mistake."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from refocused.commands.output import count
from refocused.system.errors import ConfigError, ExitCode, RefocusedError

if TYPE_CHECKING:
    from refocused.bucket.bucket import Bucket
    from refocused.config.data import DataConfig
    from refocused.tokenizers.encoders import TokenizerChoice

T = TypeVar("T")
SILENT_RANK_SECONDS = 3.0  # the launcher kills everybody once one rank ends: rank 0 speaks first


class Parser(argparse.ArgumentParser):
    """An argument parser for `--max_steps` as for `--max-steps`, that prints on rank 0 only."""

    given: Sequence[str] | None = None  # the command line; None: that of the process

    def read(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse a command line, or `given`, with its arguments in any order."""
        given = self.given if argv is None else argv
        return self.parse_intermixed_args(
            [dashed(one) for one in (sys.argv[1:] if given is None else given)]
        )

    def error(self, message: str) -> NoReturn:
        """Exit with one line that says what is wrong."""
        if is_another_rank():
            time.sleep(SILENT_RANK_SECONDS)
            sys.exit(ExitCode.WRONG_USE)
        self.exit(ExitCode.WRONG_USE, f"{self.prog}: {message}. See {self.prog} --help.\n")


class Once(argparse.Action):
    """Stores a value and refuses a second one, where argparse would silently take the last."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store what follows the option."""
        mark = f"{self.dest} was given"
        if hasattr(namespace, mark):
            before = getattr(namespace, self.dest)
            parser.error(f"{option_string} is given twice ({before}, then {values}). Keep one")
        setattr(namespace, mark, True)
        setattr(namespace, self.dest, values)


def run_verb(command: str, verbs: Mapping[str, tuple[str, str]], given: Sequence[str]) -> int:
    """Run the verb of `main.VERBS` that the first argument names; return the exit code.

    A verb V is the function `run_V(parser)` of its module: it adds its options, reads them by
    `parser.read()`, does the work and returns an exit code, or None for OK. Modules import what
    they need only after the options are read, so that `--help` is fast.
    """
    verb = given[0] if given and given[0] in verbs else ""
    if verb in verbs:
        code = _run_one(command, verb, *verbs[verb], given=given[1:] if verb else given)
    elif given and given[0] not in ("-h", "--help"):
        known = ", ".join(verbs)
        print(f"{command}: {given[0]!r} is no verb. There are: {known}.", file=sys.stderr)
        code = ExitCode.WRONG_USE
    else:
        with quiet_on_a_closed_pipe():
            lines = [f"  {name:<10} {what}" for name, (_, what) in verbs.items()]
            print(
                f"usage: {command} VERB ...\n",
                *lines,
                f"\n{command} VERB --help says more.",
                sep="\n",
            )
        code = ExitCode.OK if given else ExitCode.WRONG_USE
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # gloo's threads sometimes abort a normal exit; see commands/train.py
    return code


def _run_one(command: str, verb: str, module: str, what: str, *, given: Sequence[str]) -> int:
    functions = importlib.import_module(f"refocused.commands.{module}")
    run: Callable[[Parser], int | None] = getattr(functions, f"run_{verb or command}")
    parser = Parser(prog=f"{command} {verb}".rstrip(), description=what)
    parser.given = given
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        with quiet_on_a_closed_pipe():
            return run(parser) or ExitCode.OK
    except RefocusedError as error:
        if not (error.on_every_rank and is_another_rank()):
            print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("Interrupted. The same command goes on from here.", file=sys.stderr)
        return ExitCode.INTERRUPTED


def is_another_rank() -> bool:
    """Return whether a launcher started this process as a rank other than 0, which prints."""
    return os.environ.get("RANK", "0") != "0"


@contextlib.contextmanager
def quiet_on_a_closed_pipe() -> Iterator[None]:
    """Let `| head` end a command that prints; never for training, which must outlive its screen.

    SIGPIPE stays ignored: its default action would kill the process without a message when the
    connection to a bucket, or the pipe to a process of a pool, breaks.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer is written once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.FAILED)


def dashed(argument: str) -> str:
    """Spell a long option with dashes: `--max_steps=3` becomes `--max-steps=3`."""
    match = re.match(r"--[A-Za-z_-]+", argument)
    return argument if match is None else match[0].replace("_", "-") + argument[match.end() :]


def is_override(argument: str) -> bool:
    """Return whether an argument has the form `section.key=value`."""
    return re.match(r"[A-Za-z_-]+(\.[A-Za-z0-9_-]+)+=", argument) is not None


def split_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the `section.key=value` arguments; raise ConfigError for anything else."""
    for argument in arguments:
        if not is_override(argument):
            raise ConfigError(
                f"command line: {argument!r} is not understood. Settings are written "
                "section.key=value, for example optimizer.lr=2e-4."
            )
    return list(arguments)


def add_credentials(parser: Parser) -> None:
    """Add the options that reaching `gs://` may need."""
    parser.add_argument("--gcs-credentials", type=Path, metavar="FILE", help="key file for gs://")
    parser.add_argument("--gcp-project", metavar="ID", help="Google Cloud project")


def place(url: str, arguments: argparse.Namespace) -> Bucket:
    """Open the bucket of an address with the command line's credentials."""
    from refocused.bucket.open_bucket import open_bucket

    return open_bucket(
        url, credentials_file=arguments.gcs_credentials, project=arguments.gcp_project
    )


def chosen(kind: type[T], arguments: argparse.Namespace, **others: Any) -> T:
    """Make a dataclass of the options named as its fields, and of `others`."""
    names = {field.name for field in dataclasses.fields(kind)} - set(others)  # type: ignore[arg-type]
    return kind(**{name: getattr(arguments, name) for name in names}, **others)


def add_tokenizer_options(parser: Parser) -> None:
    """Add the options of `tokenizer_choice`."""
    add, names = parser.add_argument, "bytes, gpt2, hub:MODEL or a tokenizer.json"
    add("--tokenizer", metavar="NAME", help=f"{names} (default: the model's own)")
    add("--bpe-folder", type=Path, metavar="DIR", help="vocab.bpe and encoder.json, for gpt2")


def tokenizer_choice(arguments: argparse.Namespace) -> TokenizerChoice | None:
    """Return the tokenizer that the command line names; None: the model's own."""
    from refocused.tokenizers.encoders import TokenizerChoice

    if arguments.tokenizer is None:
        return None
    return TokenizerChoice(arguments.tokenizer, bpe_folder=arguments.bpe_folder)


def add_reading_options(parser: Parser) -> None:
    """Add the options of `data_settings`, and those that reach the data."""
    add = parser.add_argument
    add("--dtype", choices=("uint16", "uint32", "int32", "int64"), help="of headerless .bin")
    add("--pad-id", type=int, metavar="ID", help="id that fills rows without a mask")
    add("--separator-id", type=int, metavar="ID", help="end-of-text id, between documents")
    add("--tokenizer", default="unknown", metavar="NAME", help="what made the tokens")
    add("--include", action="append", default=[], metavar="GLOB", help="only these files")
    add("--exclude", action="append", default=[], metavar="GLOB", help="not these files")
    add("--max-files", type=count, metavar="N", help="the first N in name order")
    add("--threads", type=count, default=8, metavar="N", help="files at once (8)")


def data_settings(arguments: argparse.Namespace, source: str) -> DataConfig:
    """Return the data section that the reading options make; raise ConfigError if it cannot be."""
    import pydantic

    from refocused.config.data import DataConfig

    names = ("dtype", "pad_id", "separator_id", "tokenizer", "include", "exclude", "max_files")
    given = {name: getattr(arguments, name) for name in names}
    try:
        return DataConfig(source=source, fetch_threads=arguments.threads, **given)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-").replace("fetch-threads", "threads")
        raise ConfigError(f"--{name} {first['input']!r}: {first['msg']}.") from None
