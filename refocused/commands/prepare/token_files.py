"""`prepare_data split`, `inspect`, `verify`, `manifest`, `sync`, `upload`: work on token files."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser, add_credentials, add_json, place
from refocused.commands.output import (
    check_picture,
    count,
    print_result,
    progress_line,
    ratio,
    write_picture,
)
from refocused.commands.prepare.make_shards import add_source, manifest_bytes, open_source
from refocused.system.errors import ConfigError, ExitCode, ShardError, counted
from refocused.system.number_text import duration, size_text

if TYPE_CHECKING:
    from refocused.bucket.bucket import Bucket
    from refocused.config.data import DataConfig
    from refocused.data.manifest.shard_manifest import Manifest, Shard
    from refocused.prepare.inspect_data import DataReport
    from refocused.prepare.sync import SyncResult

_NAMED = 20
MAX_FACTOR = 2.0  # between the requested share of validation and that of whole files
FOLDER_SAMPLE, BUCKET_SAMPLE = 100_000_000, 8_000_000  # tokens


def choose_validation(manifest: Manifest, *, ratio: float, seed: int) -> tuple[list[str], int]:
    """Hold out files up to a share of the tokens; return their names and their tokens.

    They are chosen by a hash of their names, so that adding files changes the choice as little as
    possible. Where whole files would miss the share by a factor of two, there are none, and so many
    tokens of the last sequences are to be held out instead.
    """
    if not 0 < ratio < 1:
        raise ShardError(
            f"--val-ratio {ratio:g} is not between 0 and 1. Give a share such as 0.01."
        )

    def rank(shard: Shard) -> bytes:
        return hashlib.blake2b(f"{seed}\0{shard.name}".encode(), digest_size=8).digest()

    target = ratio * manifest.tokens
    chosen: list[str] = []
    tokens = 0
    for shard in sorted(manifest.shards, key=rank):
        if abs(tokens + shard.tokens - target) < abs(tokens - target):  # closer to the share
            chosen.append(shard.name)
            tokens += shard.tokens
    is_near = target / MAX_FACTOR <= tokens <= target * MAX_FACTOR
    if not is_near or not chosen or len(chosen) == len(manifest.shards):
        return [], round(target)
    return sorted(chosen), tokens


def run_split(parser: Parser) -> None:
    """Choose validation files, and print the lines for the run file."""
    parser.examples = ("data/tokens --val-ratio 0.01",)
    add_source(parser)
    add = parser.group("output")
    add("--val-ratio R", "share of the tokens for validation", type=ratio, default=0.01)
    add("--seed N", "seed of the choice of files", type=int, default=0)
    arguments = parser.read()
    from refocused.data.manifest.shard_manifest import build_manifest

    manifest = build_manifest(*open_source(arguments), cache_file=None)
    names, tokens = choose_validation(manifest, ratio=arguments.val_ratio, seed=arguments.seed)
    fraction = 0.0 if names else arguments.val_ratio
    record = {
        "source": arguments.source,
        "validation_files": names,
        "validation_fraction": fraction,
        "validation_tokens": tokens,
        "tokens": manifest.tokens,
    }
    share, files = tokens / manifest.tokens, len(manifest.shards)
    if names:
        why = f"# {len(names)} of {files:,} files: {share:.2%} of the tokens"
        setting = "  validation_files:"
    else:
        why = f"# {files} files are too few for {share:.2%}: the last sequences by name validate."
        setting = f"  validation_fraction: {fraction:g}"
    lines = [why, f"data:\n  source: {arguments.source}", setting]
    lines += [f"    - {json.dumps(name)}" for name in names]
    print_result(record, lines, as_json=arguments.json)


def run_inspect(parser: Parser) -> int:
    """Report what token files contain; the exit code is CHECK_FAILED if one is not usable."""
    parser.examples = ("data/tokens", "gs://my-bucket/tokens --vocabulary 50257")
    add_source(parser)
    sample = parser.group("input", exclusive=True)
    sample("--sample-tokens N", "tokens to read (default: 1e8, or 8e6 from gs://)", type=count)
    sample("--all", "read everything")
    add = parser.group("input")
    add("--vocabulary N", "report ids that a model of N ids lacks", type=count)
    add("--bpe-folder DIR", "GPT-2's files, to show text")
    parser.group("output")("--picture FILE.png", "draw ids and lengths of documents", type=Path)
    arguments = parser.read()
    check_picture(arguments.picture)
    from refocused.prepare.inspect_data import draw_report, inspect_data

    usual = BUCKET_SAMPLE if "://" in arguments.source else FOLDER_SAMPLE
    sample_tokens = 2**62 if arguments.all else arguments.sample_tokens or usual
    bucket, data = open_source(arguments)
    data = data.model_copy(update={"bpe_folder": arguments.bpe_folder})
    report = inspect_data(bucket, data, sample_tokens, arguments.vocabulary, shows_text=True)
    print_result(dataclasses.asdict(report), _report_lines(report), as_json=arguments.json)
    if arguments.picture is not None:
        write_picture(functools.partial(draw_report, report), arguments.picture)
    return ExitCode.CHECK_FAILED if report.problems else ExitCode.OK


def _report_lines(report: DataReport) -> list[str]:
    sample, unknown = report.sample, "unknown"
    kinds = ", ".join(f"{number} {kind}" for kind, number in report.kinds.items()) or "none"
    frequent = ", ".join(f"{one} {share:.1%}" for one, share in sample.most_frequent[:5])
    padding, size, documents = report.padding_fraction, report.bytes_per_token, report.documents
    rows = {
        "files": f"{report.files} ({kinds}), {size_text(report.bytes)}",
        "tokens": f"{report.tokens:,}",
        "padding": unknown if padding is None else f"{padding:.1%} of what is stored",
        "stored": unknown if size is None else f"{size:.2f} bytes for each token",
        "documents": unknown if documents is None else f"{documents:,}",
        "tokenizer": report.tokenizer or unknown,
        "read": f"{counted(sample.tokens, 'token')} of {counted(report.sampled_files, 'file')}: "
        + (
            "unknown without --separator-id"
            if sample.documents is None
            else f"{sample.documents:,}"
        ),
        "ids": "none"
        if sample.max_id is None
        else f"{sample.min_id} to {sample.max_id}, {sample.distinct_ids:,} different",
    }
    if frequent:
        rows["frequent"] = frequent
    if report.lost_fraction is not None:
        rows["round trip"] = f"{1 - report.lost_fraction:.2%} of the compared ids come back"
    return [
        report.url,
        *(f"  {name:<10} {value}" for name, value in rows.items()),
        *(f"  text       {text}" for text in report.texts),
        *(f"  note: {note}" for note in report.notes),
        *(f"  PROBLEM: {problem}" for problem in report.problems),
    ]


def run_verify(parser: Parser) -> int:
    """Verify every file; the exit code is CHECK_FAILED if one is wrong."""
    parser.examples = ("data/tokens", "data/tokens --deep --vocabulary 50257")
    add_source(parser)
    add = parser.group("input")
    add("--deep", "read all tokens, not only checksums or headers")
    add("--vocabulary N", "with --deep, report ids that a model with N of them lacks", type=count)
    arguments = parser.read()
    from refocused.prepare.verify_data import verify_data

    if arguments.vocabulary is not None and not arguments.deep:
        raise ConfigError("--vocabulary needs --deep, which reads the ids.")
    bucket, data = open_source(arguments)
    with progress_line("verify") as show:
        findings = verify_data(
            bucket, data, deep=arguments.deep, vocabulary=arguments.vocabulary, progress=show
        )
    bad = [finding.problem for finding in findings if finding.problem is not None]
    lines = bad[:_NAMED]
    if len(bad) > _NAMED:
        lines.append(f"and {len(bad) - _NAMED:,} more; --json lists all")
    size = size_text(sum(finding.size for finding in findings))
    tokens = sum(finding.tokens or 0 for finding in findings)
    right = f"{len(findings) - len(bad):,} of {len(findings):,} files are right"
    lines.append(f"{arguments.source}: {right} ({size}, {tokens:,} tokens)")
    record = [dataclasses.asdict(finding) for finding in findings]
    print_result(record, lines, as_json=arguments.json)
    return ExitCode.CHECK_FAILED if bad else ExitCode.OK


def run_manifest(parser: Parser) -> None:
    """List the files with their tokens, from their headers; print or store the manifest."""
    parser.examples = ("data/tokens", "gs://my-bucket/tokens --tokenizer gpt2 --write")
    add_source(parser, json_help="print the manifest's text")
    stored = parser.group("output", exclusive=True)
    stored("--write", "store it beside the files")
    stored("--update", "add files that the stored manifest does not list")
    arguments = parser.read()
    from refocused.data.formats.object_names import MANIFEST_NAME
    from refocused.data.manifest import shard_manifest

    bucket, data = open_source(arguments)
    if arguments.update:
        manifest, lines = _updated_manifest(bucket, data)
    else:
        # Read the files' headers, not an earlier manifest.
        data = data.model_copy(update={"exclude": (*data.exclude, MANIFEST_NAME)})
        manifest = shard_manifest.build_manifest(bucket, data, cache_file=None)
        gone: list[str] = []
        if bucket.info(MANIFEST_NAME) is not None:
            earlier = shard_manifest.read_manifest(bucket)
            names = {shard.name for shard in manifest.shards}
            gone = sorted(shard.name for shard in earlier.shards if shard.name not in names)
            manifest = _with_known(manifest, earlier)
        if arguments.write:
            manifest = _with_checksums(bucket, manifest)
            shard_manifest.write_manifest(bucket, manifest)
        lines = [
            f"{counted(len(manifest.shards), 'file')}, {size_text(manifest_bytes(manifest))}",
            f"  {manifest.tokens:,} tokens, tokenizer {manifest.tokenizer}",
            f"  fingerprint {manifest.fingerprint[:16]}",
        ]
        if gone:
            lines.append(
                f"  without {counted(len(gone), 'file')} of the stored one, such as {gone[0]}"
            )
    if arguments.json:
        print(shard_manifest.manifest_to_json(manifest), end="")
        return
    print(f"{arguments.source}: " + "\n".join(lines))
    if arguments.write:
        print(f"  written as {MANIFEST_NAME}", file=sys.stderr)


def _updated_manifest(bucket: Bucket, data: DataConfig) -> tuple[Manifest, list[str]]:
    """Add the files that the stored manifest does not list; return it and what changed."""
    from refocused.data.formats.object_names import MANIFEST_NAME
    from refocused.data.manifest import shard_manifest
    from refocused.data.manifest.shard_manifest import unlisted_names

    listing = {blob.name: blob for blob in bucket.list()}
    if MANIFEST_NAME not in listing:
        raise ShardError(f"{bucket.url} has no {MANIFEST_NAME} to update. Make one with --write.")
    earlier = shard_manifest.read_manifest(bucket)
    shard_manifest.check_tokenizer(earlier, data, url=bucket.url)
    names = unlisted_names(listing, listed={shard.name for shard in earlier.shards}, data=data)
    lines = [f"{len(names):,} files are added to {len(earlier.shards):,}"]
    if not names:
        return earlier, lines
    added = shard_manifest.describe_files(
        bucket, [listing[name] for name in names], data, cache_file=None
    )
    found = _with_checksums(bucket, dataclasses.replace(earlier, shards=added)).shards
    shards = sorted([*earlier.shards, *found], key=lambda shard: shard.name)
    manifest = dataclasses.replace(earlier, shards=tuple(shards))
    shard_manifest.write_manifest(bucket, manifest)
    lines += [
        f"  {earlier.tokens:,} -> {manifest.tokens:,} tokens",
        f"  fingerprint {earlier.fingerprint[:16]} -> {manifest.fingerprint[:16]}",
        "  A run on these data goes on without the new files. To resume it after a stop, add",
        "  --allow-change data: it then begins a new epoch over all files.",
    ]
    return manifest, lines


def _with_known(manifest: Manifest, earlier: Manifest) -> Manifest:
    """Keep what an earlier manifest has and headers lack."""
    known = {(shard.name, shard.size, shard.tokens): shard for shard in earlier.shards}

    def completed(shard: Shard) -> Shard:
        row = known.get((shard.name, shard.size, shard.tokens), shard)
        kept = ("max_id", "documents", "packed_for", "document_id")
        return dataclasses.replace(shard, **{name: getattr(row, name) for name in kept})

    shards = tuple(completed(shard) for shard in manifest.shards)
    tokenizer = earlier.tokenizer if manifest.tokenizer == "unknown" else manifest.tokenizer
    if tokenizer == earlier.tokenizer:
        return dataclasses.replace(earlier, shards=shards)
    return dataclasses.replace(manifest, shards=shards, tokenizer=tokenizer, vocabulary=None)


def _with_checksums(bucket: Bucket, manifest: Manifest) -> Manifest:
    """Compute the checksums that the store does not keep."""
    from refocused.bucket.bucket import stored_crc32c

    total, done, shards = manifest_bytes(manifest), 0, []
    with progress_line("manifest") as show:
        for shard in manifest.shards:
            show(done, total)
            known = stored_crc32c(bucket, shard.blob)
            shards.append(dataclasses.replace(shard, crc32c=known, sample=None))
            done += shard.size
    return dataclasses.replace(manifest, shards=tuple(shards))


def run_sync(parser: Parser) -> None:
    """Download what the folder lacks."""
    parser.examples = ("gs://my-bucket/tokens data/tokens --max-files 10",)
    parser.add_argument("source", metavar="URL", help="gs:// address or folder to copy")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write to")
    add = parser.group("input")
    add("--max-files N", "copy the first N token or text files", type=count)
    add("--include GLOB", "copy only these objects; repeatable", action="append", default=[])
    add("--exclude GLOB", "skip these; repeatable", action="append", default=[])
    _add_moving_options(parser)
    arguments = parser.read()
    from refocused.prepare.sync import sync_folder

    bucket, folder = place(arguments.source, arguments), arguments.folder
    chosen = {name: getattr(arguments, name) for name in ("include", "exclude", "max_files")}
    move = functools.partial(sync_folder, bucket, folder, **chosen)
    _move("sync", move, str(folder), arguments)


def run_upload(parser: Parser) -> None:
    """Upload what the bucket lacks."""
    parser.examples = ("data/tokens gs://my-bucket/tokens",)
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="folder to copy, without its hidden files")
    add("target", metavar="URL", help="gs:// address or folder to write to")
    _add_moving_options(parser)
    arguments = parser.read()
    from refocused.prepare.sync import upload_folder

    bucket = place(arguments.target, arguments)
    move = functools.partial(upload_folder, arguments.folder, bucket)
    _move("upload", move, arguments.target, arguments)


def _add_moving_options(parser: Parser) -> None:
    add = parser.group("storage")
    add("--threads N", "objects copied at once", type=count, default=8)
    add_credentials(parser)
    add_json(parser)


def _move(
    what: str, move: Callable[..., SyncResult], where: str, arguments: argparse.Namespace
) -> None:
    """Move objects with `move(threads=, show=)`, and print what was moved."""
    started = time.monotonic()
    with progress_line(what) as show:
        result = move(threads=arguments.threads, show=show)
    seconds, kept = time.monotonic() - started, result.objects - result.moved_objects
    verified = "all verified"
    if result.size_only:
        verified = f"{result.size_only:,} only by size, as the source keeps no checksums"
    lines = [f"{where}: {counted(result.objects, 'object')}, {size_text(result.bytes)}, {verified}"]
    if result.moved_objects:
        rate = size_text(result.moved_bytes / seconds)
        moved = f"{result.moved_objects:,} moved ({size_text(result.moved_bytes)}, {rate}/s)"
        lines.append(f"  {moved} in {duration(seconds)}, {kept:,} were there")
    record = dataclasses.asdict(result) | {"seconds": seconds}
    print_result(record, lines, as_json=arguments.json)
