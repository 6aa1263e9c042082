"""`prepare_data convert` and `split`: other forms to shards, and files kept for validation."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from refocused.commands.arguments import (
    Parser,
    add_credentials,
    add_reading_options,
    data_settings,
    place,
    work_folder,
)
from refocused.commands.output import ProgressLine, count, ratio, size_text
from refocused.system.errors import ConfigError, ExitCode

USUAL_VOCABULARY = 65_536


def add_convert_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("source", metavar="DIR_OR_URL", help="folder or gs:// address of token files")
    add("--out", required=True, metavar="DIR_OR_URL", help="where the shards go; must be empty")
    add("--allow-pickle", action="store_true", help="read pickled arrays: they can run any code")
    add("--shard-tokens", type=count, metavar="N", help="pack the files (default: file by file)")
    add("--vocabulary", type=count, default=USUAL_VOCABULARY, metavar="N", help="(65536: uint16)")
    add("--name", default="tokens", metavar="NAME", help="start of packed shards' names (tokens)")
    add(
        "--work-folder", type=Path, metavar="DIR", help="for what is unfinished, with a gs:// --out"
    )
    add("--json", action="store_true", help="print JSON")
    add_reading_options(parser)
    add_credentials(parser)


def run_convert(arguments: argparse.Namespace) -> int:
    """Convert, and say what was made."""
    from refocused.prepare.convert import ConvertRequest, convert

    check_name(arguments.name)
    line = ProgressLine("convert")
    try:
        manifest = convert(
            place(arguments.source, arguments),
            place(arguments.out, arguments),
            data=data_settings(arguments, arguments.source),
            work=work_folder(arguments.out, arguments.work_folder),
            request=ConvertRequest(
                vocabulary=arguments.vocabulary,
                shard_tokens=arguments.shard_tokens,
                name=arguments.name,
                allow_pickle=arguments.allow_pickle,
            ),
            progress=line.show,
        )
    finally:
        line.end()
    size = sum(shard.size for shard in manifest.shards)
    if arguments.json:
        content = {
            "out": arguments.out,
            "shards": len(manifest.shards),
            "tokens": manifest.tokens,
            "bytes": size,
            "fingerprint": manifest.fingerprint,
        }
        print(json.dumps(content, indent=1))
    else:
        print(f"{arguments.out}: {len(manifest.shards):,} shards, {size_text(size)}")
        print(f"  {manifest.tokens:,} tokens, {manifest.shards[0].dtype}")
        print("To train on them, in the run file:")
        print(f"data:\n  source: {arguments.out}\n  tokenizer: {manifest.tokenizer}")
    return ExitCode.OK


def check_name(name: str) -> None:
    """Refuse a start of shards' names that is no plain word.

    Raises:
        ConfigError: It is none.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise ConfigError(
            f"--name {name!r}: shards are named with letters, digits, _ and - only. Choose another."
        )


def add_split_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("source", metavar="DIR_OR_URL", help="folder or gs:// address of token files")
    add("--val-ratio", type=ratio, default=0.01, metavar="R", help="share of the tokens (0.01)")
    add("--seed", type=int, default=0, metavar="N", help="another seed, other files (0)")
    add("--json", action="store_true", help="print JSON")
    add_reading_options(parser)
    add_credentials(parser)


def run_split(arguments: argparse.Namespace) -> int:
    """Choose files, and print what to put into the run file; nothing is written or copied."""
    from refocused.data.manifest.select_files import choose_validation
    from refocused.data.manifest.shard_manifest import build_manifest

    bucket = place(arguments.source, arguments)
    data = data_settings(arguments, arguments.source)
    manifest = build_manifest(bucket, data, cache_file=None)
    split = choose_validation(manifest, ratio=arguments.val_ratio, seed=arguments.seed)
    if arguments.json:
        content = {
            "source": arguments.source,
            "validation_files": split.files,
            "validation_fraction": split.fraction,
            "validation_tokens": split.tokens,
            "tokens": split.total_tokens,
        }
        print(json.dumps(content, indent=1))
        return ExitCode.OK
    share = split.tokens / split.total_tokens
    if split.files:
        print(f"# {len(split.files)} of {len(manifest.shards)} files: {share:.2%} of the tokens")
        print(f"data:\n  source: {arguments.source}\n  validation_files:")
        for name in split.files:
            print(f"    - {json.dumps(name)}")
    else:
        print(f"# {len(manifest.shards)} files are too few for {share:.2%}: the last windows are")
        print("# kept instead, in name order.")
        print(f"data:\n  source: {arguments.source}\n  validation_fraction: {split.fraction:g}")
    return ExitCode.OK
