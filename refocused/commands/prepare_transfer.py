"""`prepare_data sync` and `upload`: folders and buckets made equal."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser, add_credentials, place
from refocused.commands.output import ProgressLine, count, duration_text, size_text
from refocused.system.errors import ExitCode

if TYPE_CHECKING:
    from refocused.prepare.sync import SyncResult


def add_sync_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("source", metavar="URL", help="gs:// address, or a folder")
    add("folder", type=Path, metavar="DIR", help="where the objects go")
    add("--max-files", type=count, metavar="N", help="the first N files of tokens or text")
    add("--include", action="append", default=[], metavar="GLOB", help="only these objects")
    add("--exclude", action="append", default=[], metavar="GLOB", help="not these objects")
    _add_common(parser)


def run_sync(arguments: argparse.Namespace) -> int:
    """Fetch what the folder lacks."""
    from refocused.prepare.sync import Selection, sync_folder

    line, started = ProgressLine("sync"), time.monotonic()
    selection = Selection(tuple(arguments.include), tuple(arguments.exclude), arguments.max_files)
    try:
        result = sync_folder(
            place(arguments.source, arguments),
            arguments.folder,
            selection=selection,
            threads=arguments.threads,
            show=line.show,
        )
    finally:
        line.end()
    _print(result, time.monotonic() - started, arguments, where=str(arguments.folder))
    return ExitCode.OK


def add_upload_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="what is stored; hidden files are left out")
    add("target", metavar="URL", help="gs:// address, or a folder")
    _add_common(parser)


def run_upload(arguments: argparse.Namespace) -> int:
    """Store what the bucket lacks."""
    from refocused.prepare.folder_upload import upload_folder

    line, started = ProgressLine("upload"), time.monotonic()
    try:
        result = upload_folder(
            arguments.folder,
            place(arguments.target, arguments),
            threads=arguments.threads,
            show=line.show,
        )
    finally:
        line.end()
    _print(result, time.monotonic() - started, arguments, where=arguments.target)
    return ExitCode.OK


def _add_common(parser: Parser) -> None:
    parser.add_argument("--threads", type=count, default=8, metavar="N", help="at once (8)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_credentials(parser)


def _print(
    result: SyncResult, seconds: float, arguments: argparse.Namespace, *, where: str
) -> None:
    if arguments.json:
        print(json.dumps(dataclasses.asdict(result) | {"seconds": seconds}, indent=1))
        return
    kept = result.objects - result.moved_objects
    verified = "all verified"
    if result.size_only:
        verified = f"{result.size_only:,} of them only by size: their source keeps no checksums"
    print(f"{where}: {result.objects:,} objects, {size_text(result.bytes)}, {verified}")
    if result.moved_objects:
        rate = size_text(result.moved_bytes / seconds)
        moved = f"{result.moved_objects:,} moved ({size_text(result.moved_bytes)}, {rate}/s)"
        print(f"  {moved} in {duration_text(seconds)}, {kept:,} were there")
