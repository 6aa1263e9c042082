"""Options that say how token files are read: the same as in a run file's data section."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser
from refocused.commands.output import count

if TYPE_CHECKING:
    from refocused.config.data import DataConfig


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
