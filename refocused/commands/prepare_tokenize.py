"""`prepare_data tokenize`: text files to shards."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser, add_credentials, place, work_folder
from refocused.commands.output import (
    ProgressLine,
    count,
    count_text,
    duration_text,
    ratio,
    size_text,
)
from refocused.commands.prepare_convert import check_name
from refocused.system.errors import ExitCode

if TYPE_CHECKING:
    from refocused.prepare.sync import SyncResult
    from refocused.prepare.tokenize import TokenizeProgress, TokenizeRequest, TokenizeResult


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


SHARD_TOKENS = 100_000_000


def add_tokenize_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("inputs", nargs="+", metavar="IN", help=".txt, .jsonl, .jsonl.gz, .parquet; or folders")
    add("--out", required=True, metavar="DIR_OR_URL", help="where the shards go; must be empty")
    add(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="gpt2, bytes, a tokenizer.json, or hub:MODEL",
    )
    add("--bpe-folder", type=Path, metavar="DIR", help="vocab.bpe and encoder.json, for gpt2")
    add("--end-of-text", metavar="TOKEN", help="put before each document (for a tokenizer.json)")
    add("--workers", type=count, default=os.cpu_count(), metavar="N", help="processes (all cores)")
    add("--shard-tokens", type=count, default=SHARD_TOKENS, metavar="N", help="(1e8)")
    add("--val-ratio", type=ratio, default=0.0, metavar="R", help="share of the documents (0)")
    add("--field", default="text", metavar="NAME", help="of .jsonl and .parquet (text)")
    add("--separator", metavar="LINE", help="between documents of a .txt (default: one document)")
    add("--bad-text", choices=("refuse", "replace"), default="refuse", help="no UTF-8 (refuse)")
    add("--name", default="tokens", metavar="NAME", help="start of the shards' names (tokens)")
    add(
        "--work-folder", type=Path, metavar="DIR", help="for what is unfinished, with a gs:// --out"
    )
    add("--json", action="store_true", help="print JSON")
    add_credentials(parser)


def run_tokenize(arguments: argparse.Namespace) -> int:
    """Tokenise, and say what was made and how to train on it."""
    from refocused.prepare.text_inputs import find_inputs
    from refocused.prepare.tokenize import tokenize

    request = _request(arguments)
    bucket = place(arguments.out, arguments)
    inputs = find_inputs(arguments.inputs)
    line = ProgressLine("tokenize")
    started = time.monotonic()

    def show(progress: TokenizeProgress) -> None:
        speed = progress.tokens / max(time.monotonic() - started, 1e-9)
        note = f"{progress.shards} shards | {count_text(speed)} tokens/s"
        line.show(progress.done_bytes, progress.total_bytes, note)

    try:
        result = tokenize(
            inputs,
            bucket,
            work=work_folder(arguments.out, arguments.work_folder),
            request=request,
            workers=arguments.workers,
            progress=show,
        )
    finally:
        line.end()
    seconds = time.monotonic() - started
    if arguments.json:
        _print_json(result, seconds, arguments)
    else:
        _print_summary(result, seconds, arguments)
    if arguments.val_ratio and not _tokens(result, "val"):
        print(
            f"No document is for validation: {arguments.val_ratio:g} of "
            f"{_documents(result):,} documents. Name the line between documents by --separator, "
            "or set data.validation_fraction in the run file, which keeps windows.",
            file=sys.stderr,
        )
    return ExitCode.OK


def _request(arguments: argparse.Namespace) -> TokenizeRequest:
    from refocused.prepare.tokenize import TokenizeRequest
    from refocused.tokenizers.encoders import TokenizerChoice

    check_name(arguments.name)
    return TokenizeRequest(
        tokenizer=TokenizerChoice(
            arguments.tokenizer, bpe_folder=arguments.bpe_folder, end_of_text=arguments.end_of_text
        ),
        shard_tokens=arguments.shard_tokens,
        validation_ratio=arguments.val_ratio,
        name=arguments.name,
        field=arguments.field,
        separator=arguments.separator,
        bad_text=arguments.bad_text,
    )


def _tokens(result: TokenizeResult, split: str) -> int:
    return sum(s.tokens for s in result.manifest.shards if f"_{split}_" in s.name)


def _documents(result: TokenizeResult) -> int:
    return sum(shard.documents or 0 for shard in result.manifest.shards)


def _print_json(result: TokenizeResult, seconds: float, arguments: argparse.Namespace) -> None:
    import json

    manifest = result.manifest
    content = {
        "out": arguments.out,
        "tokenizer": manifest.tokenizer,
        "tokens": manifest.tokens,
        "train_tokens": _tokens(result, "train"),
        "val_tokens": _tokens(result, "val"),
        "documents": _documents(result),
        "shards": len(manifest.shards),
        "kept_shards": result.kept_shards,
        "new_tokens": result.new_tokens,
        "seconds": seconds,
        "fingerprint": manifest.fingerprint,
    }
    print(json.dumps(content, indent=1))


def _print_summary(result: TokenizeResult, seconds: float, arguments: argparse.Namespace) -> None:
    manifest = result.manifest
    kept = f", {result.kept_shards} of them verified and kept" if result.kept_shards else ""
    print(f"{arguments.out}: {len(manifest.shards)} shards{kept}")
    print(
        f"  {manifest.tokens:,} tokens of {_documents(result):,} documents "
        f"({_tokens(result, 'val'):,} for validation), {manifest.shards[0].dtype}"
    )
    if result.new_tokens:
        speed = count_text(result.new_tokens / seconds)
        print(f"  {speed} tokens/s over {duration_text(seconds)}, {arguments.workers} processes")
    print("To train on them, in the run file:")
    print(f"data:\n  source: {arguments.out}\n  tokenizer: {arguments.tokenizer}")
    if arguments.bpe_folder is not None:
        print(f"  bpe_folder: {arguments.bpe_folder}")
    if _tokens(result, "val"):
        print(f'  validation_files: ["{arguments.name}_val_*"]')
    print("model:\n  vocabulary: auto")
