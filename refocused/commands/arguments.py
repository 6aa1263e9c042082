"""Arguments that commands share: options, places, credentials, and exit code 2 for a mistake."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from refocused.commands.output import count
from refocused.system.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from refocused.bucket.bucket import Bucket
    from refocused.config.data import DataConfig


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


def add_credentials(parser: Parser) -> None:
    """Add the options that reaching `gs://` may need."""
    parser.add_argument("--gcs-credentials", type=Path, metavar="FILE", help="key file for gs://")
    parser.add_argument("--gcp-project", metavar="ID", help="Google Cloud project")


def place(url: str, arguments: argparse.Namespace) -> Bucket:
    """Return the bucket of an address, reached as the command line says.

    Raises:
        BucketError: The address names none.
    """
    from refocused.bucket.open_bucket import open_bucket

    return open_bucket(
        url, credentials_file=arguments.gcs_credentials, project=arguments.gcp_project
    )


def work_folder(out: str, named: Path | None) -> Path:
    """Return where unfinished work is kept: inside a folder that is written, or beside a run.

    Args:
        out: Where the work goes when it is finished.
        named: What the command line names; None: nothing.

    Raises:
        ConfigError: One is named though `out` is a folder, which keeps its own.
    """
    if not out.startswith("gs://"):
        if named is not None:
            raise ConfigError("--work-folder: it is for a gs:// --out; a folder keeps its own.")
        return Path(out).expanduser() / ".prepare"
    return named or Path("data/prepare") / re.sub(r"[^a-z0-9._-]+", "_", out[5:].lower())


def add_reading_options(parser: Parser) -> None:
    """Add the options."""
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
    """Return the data section that the options make.

    Raises:
        ConfigError: A value cannot be.
    """
    import pydantic

    from refocused.config.data import DataConfig
    from refocused.system.errors import ConfigError

    try:
        return DataConfig(
            source=source,
            dtype=arguments.dtype,
            pad_id=arguments.pad_id,
            separator_id=arguments.separator_id,
            tokenizer=arguments.tokenizer,
            include=tuple(arguments.include),
            exclude=tuple(arguments.exclude),
            max_files=arguments.max_files,
            fetch_threads=arguments.threads,
        )
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).replace("_", "-").replace("fetch-threads", "threads")
        raise ConfigError(f"--{name} {first['input']!r}: {first['msg']}.") from None
