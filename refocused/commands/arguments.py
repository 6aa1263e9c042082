"""How every command reads its arguments: `_` and `-` alike, one line for a mistake, exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from refocused.system.errors import ConfigError, ExitCode

SILENT_RANK_SECONDS = 3.0  # the launcher kills everybody once one rank ends: rank 0 speaks first


class Parser(argparse.ArgumentParser):
    """An argument parser for `--max_steps` as for `--max-steps`, that speaks on rank 0 only."""

    def read(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse arguments in any order; None takes those of the process."""
        given = sys.argv[1:] if argv is None else argv
        return self.parse_intermixed_args([dashed(one) for one in given])

    def error(self, message: str) -> NoReturn:
        """End with one line that says what is wrong."""
        if is_another_rank():
            time.sleep(SILENT_RANK_SECONDS)
            sys.exit(ExitCode.WRONG_USE)
        self.exit(ExitCode.WRONG_USE, f"{self.prog}: {message}. See {self.prog} --help.\n")


class Once(argparse.Action):
    """Stores a value and refuses a second one, where argparse would take the last in silence."""

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


def is_another_rank() -> bool:
    """Tell whether a launcher started this process as another than rank 0, which speaks."""
    return os.environ.get("RANK", "0") != "0"


@contextlib.contextmanager
def quiet_on_a_closed_pipe() -> Iterator[None]:
    """Let `| head` end a command that prints; never for training, which must outlive its screen.

    SIGPIPE stays ignored: its own way would end the process without a word when the connection to
    a bucket, or the pipe to a process of a pool, breaks.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer is written once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.FAILED)


def dashed(argument: str) -> str:
    """Spell a long option with dashes: `--max_steps=3` becomes `--max-steps=3`."""
    match = re.match(r"--[A-Za-z_-]+", argument)
    if match is None:
        return argument
    return match[0].replace("_", "-") + argument[match.end() :]


def is_override(argument: str) -> bool:
    """Tell whether an argument has the form `section.key=value`."""
    return re.match(r"[A-Za-z_-]+(\.[A-Za-z0-9_-]+)+=", argument) is not None


def split_overrides(arguments: Sequence[str]) -> list[str]:
    """Return the `section.key=value` arguments.

    Raises:
        ConfigError: Something else stands among them.
    """
    for argument in arguments:
        if not is_override(argument):
            raise ConfigError(
                f"command line: {argument!r} is not understood. Settings are written "
                "section.key=value, for example optimizer.lr=2e-4."
            )
    return list(arguments)
