"""`prepare_data tokenize`: text files to shards."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser, add_credentials, place, work_folder
from refocused.commands.output import ProgressLine, count, count_text, duration_text, ratio
from refocused.commands.prepare_convert import check_name
from refocused.system.errors import ExitCode

if TYPE_CHECKING:
    from refocused.prepare.tokenize import TokenizeProgress, TokenizeRequest, TokenizeResult


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
