"""`prepare_data tokenize`, `convert`: make shards of texts, or of other token files."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import (
    Parser,
    add_credentials,
    add_reading_options,
    chosen,
    data_settings,
    place,
)
from refocused.commands.output import (
    count,
    count_text,
    duration_text,
    print_result,
    progress_line,
    ratio,
    size_text,
)
from refocused.system.errors import ConfigError

if TYPE_CHECKING:
    from refocused.bucket.bucket import Bucket
    from refocused.config.data import DataConfig
    from refocused.data.manifest.shard_manifest import Manifest
    from refocused.prepare.tokenize import TokenizeProgress, TokenizeResult


def add_source(parser: Parser, *, json_help: str = "print JSON") -> None:
    """Add what names token files and says how to read them, and `--json`."""
    help_text = "folder or gs:// address of token files"
    parser.add_argument("source", metavar="DIR_OR_URL", help=help_text)
    parser.add_argument("--json", action="store_true", help=json_help)
    add_reading_options(parser)
    add_credentials(parser)


def open_source(arguments: argparse.Namespace) -> tuple[Bucket, DataConfig]:
    """Return where the token files are, and how to read them."""
    return place(arguments.source, arguments), data_settings(arguments, arguments.source)


def _add_out(parser: Parser) -> None:
    add = parser.add_argument
    add("--out", required=True, metavar="DIR_OR_URL", help="where the shards go; must be empty")
    add("--name", default="tokens", metavar="NAME", help="start of the shards' names (tokens)")
    text = "for what is unfinished, with a gs:// --out"
    add("--work-folder", type=Path, metavar="DIR", help=text)


def _work_folder(arguments: argparse.Namespace) -> Path:
    """Return where unfinished work is kept: inside a folder that is written, or beside a run.

    Raises:
        ConfigError: The start of the shards' names is not a plain word, or --work-folder is given
            though `--out` is a folder, which keeps its own.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", arguments.name):
        raise ConfigError(
            f"--name {arguments.name!r}: shards are named with letters, digits, _ and - only. "
            "Choose another."
        )
    out, named = arguments.out, arguments.work_folder
    if out.startswith("gs://"):
        return named or Path("data/prepare") / re.sub(r"[^a-z0-9._-]+", "_", out[5:].lower())
    if named is not None:
        raise ConfigError("--work-folder: it is for a gs:// --out; a folder keeps its own.")
    return Path(out).expanduser() / ".prepare"


def run_tokenize(parser: Parser) -> None:
    """Tokenize text; print what was made and how to train on it."""
    add = parser.add_argument
    add("inputs", nargs="+", metavar="IN", help=".txt, .jsonl, .jsonl.gz, .parquet; or folders")
    _add_out(parser)
    names = "gpt2, bytes, a tokenizer.json, or hub:MODEL"
    add("--tokenizer", required=True, metavar="NAME", help=names)
    add("--bpe-folder", type=Path, metavar="DIR", help="vocab.bpe and encoder.json, for gpt2")
    add("--end-of-text", metavar="TOKEN", help="put before each document (for a tokenizer.json)")
    add("--workers", type=count, default=os.cpu_count(), metavar="N", help="processes (all cores)")
    add("--shard-tokens", type=count, default=100_000_000, metavar="N", help="(1e8)")
    add("--val-ratio", type=ratio, default=0.0, metavar="R", help="share of the documents (0)")
    add("--field", default="text", metavar="NAME", help="of .jsonl and .parquet (text)")
    add("--separator", metavar="LINE", help="between documents of a .txt (default: one document)")
    add("--bad-text", choices=("refuse", "replace"), default="refuse", help="no UTF-8 (refuse)")
    add("--json", action="store_true", help="print JSON")
    add_credentials(parser)
    arguments = parser.read()
    from refocused.prepare.text_inputs import find_inputs
    from refocused.prepare.tokenize import tokenize
    from refocused.prepare.tokenize_worker import TokenizeRequest
    from refocused.tokenizers.encoders import TokenizerChoice

    work = _work_folder(arguments)
    tokenizer = TokenizerChoice(
        arguments.tokenizer, bpe_folder=arguments.bpe_folder, end_of_text=arguments.end_of_text
    )
    share = arguments.val_ratio
    request = chosen(TokenizeRequest, arguments, tokenizer=tokenizer, validation_ratio=share)
    bucket = place(arguments.out, arguments)
    inputs = find_inputs(arguments.inputs)
    started = time.monotonic()
    with progress_line("tokenize") as show:

        def show_tokens(progress: TokenizeProgress) -> None:
            speed = progress.tokens / max(time.monotonic() - started, 1e-9)
            note = f"{progress.shards} shards | {count_text(speed)} tokens/s"
            show(progress.done_bytes, progress.total_bytes, note)

        workers = arguments.workers
        result = tokenize(
            inputs, bucket, work=work, request=request, workers=workers, progress=show_tokens
        )
    _print_tokenized(result, time.monotonic() - started, arguments)


def _print_tokenized(result: TokenizeResult, seconds: float, arguments: argparse.Namespace) -> None:
    manifest, kept = result.manifest, result.kept_shards
    val = sum(
        shard.tokens for shard in manifest.shards if shard.name.startswith(f"{arguments.name}_val_")
    )
    documents = sum(shard.documents or 0 for shard in manifest.shards)
    record = {
        "out": arguments.out,
        "tokenizer": manifest.tokenizer,
        "tokens": manifest.tokens,
        "train_tokens": manifest.tokens - val,
        "val_tokens": val,
        "documents": documents,
        "shards": len(manifest.shards),
        "kept_shards": kept,
        "new_tokens": result.new_tokens,
        "seconds": seconds,
        "fingerprint": manifest.fingerprint,
    }
    verified = f", {kept} of them verified and kept" if kept else ""
    lines = [
        f"{arguments.out}: {len(manifest.shards)} shards{verified}",
        f"  {manifest.tokens:,} tokens of {documents:,} documents ({val:,} for validation), "
        f"{manifest.shards[0].dtype}",
    ]
    if result.new_tokens:
        speed = f"{count_text(result.new_tokens / seconds)} tokens/s over {duration_text(seconds)}"
        lines.append(f"  {speed}, {arguments.workers} processes")
    lines += _train_lines(arguments.out, arguments.tokenizer)
    if arguments.bpe_folder is not None:
        lines.append(f"  bpe_folder: {arguments.bpe_folder}")
    if val:
        lines.append(f'  validation_files: ["{arguments.name}_val_*"]')
    print_result(record, [*lines, "model:\n  vocabulary: auto"], as_json=arguments.json)
    if arguments.val_ratio and not val:
        print(
            f"No document is for validation: {arguments.val_ratio:g} of {documents:,} documents. "
            "Name the line between documents by --separator, or set data.validation_fraction in "
            "the run file, which keeps windows.",
            file=sys.stderr,
        )


def _train_lines(out: str, tokenizer: str) -> list[str]:
    settings = f"data:\n  source: {out}\n  tokenizer: {tokenizer}"
    return ["To train on them, in the run file:", settings]


def run_convert(parser: Parser) -> None:
    """Convert token files; print what was made."""
    add = parser.add_argument
    add_source(parser)
    _add_out(parser)
    add("--allow-pickle", action="store_true", help="read pickled arrays: they can run any code")
    add("--shard-tokens", type=count, metavar="N", help="pack the files (default: file by file)")
    add("--vocabulary", type=count, default=65_536, metavar="N", help="(65536: uint16)")
    arguments = parser.read()
    from refocused.prepare.convert import ConvertRequest, convert

    work = _work_folder(arguments)
    bucket, data = open_source(arguments)
    out, request = place(arguments.out, arguments), chosen(ConvertRequest, arguments)
    with progress_line("convert") as show:
        manifest = convert(bucket, out, data=data, work=work, request=request, progress=show)
    shards, size = len(manifest.shards), manifest_bytes(manifest)
    record = {"out": arguments.out, "shards": shards, "tokens": manifest.tokens, "bytes": size}
    record["fingerprint"] = manifest.fingerprint
    lines = [
        f"{arguments.out}: {shards:,} shards, {size_text(size)}",
        f"  {manifest.tokens:,} tokens, {manifest.shards[0].dtype}",
        *_train_lines(arguments.out, manifest.tokenizer),
    ]
    print_result(record, lines, as_json=arguments.json)


def manifest_bytes(manifest: Manifest) -> int:
    """Return the bytes of the files that a manifest lists."""
    return sum(shard.size for shard in manifest.shards)
