"""`prepare_data split`, `inspect`, `verify`, `manifest`, `sync`, `upload`: work on token files."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser, add_credentials, place
from refocused.commands.output import (
    count,
    duration_text,
    print_result,
    progress_line,
    ratio,
    size_text,
)
from refocused.commands.prepare.make_shards import add_source, manifest_bytes, open_source
from refocused.system.errors import ConfigError, ExitCode, ShardError

if TYPE_CHECKING:
    from refocused.bucket.bucket import Bucket
    from refocused.config.data import DataConfig
    from refocused.data.manifest.shard_manifest import Manifest, Shard
    from refocused.prepare.inspect_data import DataReport
    from refocused.prepare.sync import SyncResult

_NAMED = 20
FOLDER_SAMPLE, BUCKET_SAMPLE = 100_000_000, 8_000_000  # tokens


def run_split(parser: Parser) -> None:
    """Choose files, and print what to put into the run file; nothing is written or copied."""
    add = parser.add_argument
    add_source(parser)
    add("--val-ratio", type=ratio, default=0.01, metavar="R", help="share of the tokens (0.01)")
    add("--seed", type=int, default=0, metavar="N", help="another seed, other files (0)")
    arguments = parser.read()
    from refocused.data.manifest.select_files import choose_validation
    from refocused.data.manifest.shard_manifest import build_manifest

    manifest = build_manifest(*open_source(arguments), cache_file=None)
    split = choose_validation(manifest, ratio=arguments.val_ratio, seed=arguments.seed)
    record = {
        "source": arguments.source,
        "validation_files": split.files,
        "validation_fraction": split.fraction,
        "validation_tokens": split.tokens,
        "tokens": split.total_tokens,
    }
    share, files = split.tokens / split.total_tokens, len(manifest.shards)
    if split.files:
        why = f"# {len(split.files)} of {files} files: {share:.2%} of the tokens"
        setting = "  validation_files:"
    else:
        why = f"# {files} files are too few for {share:.2%}: the last windows by name are kept."
        setting = f"  validation_fraction: {split.fraction:g}"
    lines = [why, f"data:\n  source: {arguments.source}", setting]
    lines += [f"    - {json.dumps(name)}" for name in split.files]
    print_result(record, lines, as_json=arguments.json)


def run_inspect(parser: Parser) -> int:
    """Report what token files hold; the exit code says whether every file can be used."""
    add = parser.add_argument
    add_source(parser)
    add("--picture", type=Path, metavar="FILE.png", help="draw the ids and the lengths")
    sample = parser.add_mutually_exclusive_group()
    text = "read so many (1e8; 8e6 of a gs:// source)"
    sample.add_argument("--sample-tokens", type=count, metavar="N", help=text)
    sample.add_argument("--all", action="store_true", help="read everything")
    add("--vocabulary", type=count, metavar="N", help="ids that the model knows")
    arguments = parser.read()
    from refocused.prepare.inspect_data import draw_report, inspect_data

    usual = BUCKET_SAMPLE if "://" in arguments.source else FOLDER_SAMPLE
    sample_tokens = 2**62 if arguments.all else arguments.sample_tokens or usual
    vocabulary = arguments.vocabulary
    report = inspect_data(
        *open_source(arguments), sample_tokens=sample_tokens, vocabulary=vocabulary
    )
    print_result(dataclasses.asdict(report), _report_lines(report), as_json=arguments.json)
    if arguments.picture is not None:
        draw_report(report, arguments.picture)
    return ExitCode.CHECK_FAILED if report.problems else ExitCode.OK


def _report_lines(report: DataReport) -> list[str]:
    sample, unknown = report.sample, "not known"
    kinds = ", ".join(f"{number} {kind}" for kind, number in report.kinds.items()) or "none"
    frequent = ", ".join(f"{one} {share:.1%}" for one, share in sample.most_frequent[:5])
    padding, size, documents = report.padding_fraction, report.bytes_per_token, report.documents
    rows = {
        "files": f"{report.files} ({kinds}), {size_text(report.bytes)}",
        "tokens": f"{report.tokens:,}",
        "padding": unknown if padding is None else f"{padding:.1%} of what is stored",
        "bytes": unknown if size is None else f"{size:.2f} a token",
        "documents": unknown if documents is None else f"{documents:,}",
        "tokenizer": report.tokenizer or "not said",
        "read": f"{sample.tokens:,} tokens of {report.sampled_files} files",
        "ids": "none"
        if sample.max_id is None
        else f"{sample.min_id} to {sample.max_id}, {sample.distinct_ids:,} different",
        "repeated": "not known: name the id between documents by --separator-id"
        if sample.documents is None
        else f"{sample.duplicate_documents:,} of {sample.documents:,} documents or rows read",
    }
    if frequent:
        rows["frequent"] = frequent
    return [
        report.url,
        *(f"  {name:<10} {value}" for name, value in rows.items()),
        *(f"  note: {note}" for note in report.notes),
        *(f"  PROBLEM: {problem}" for problem in report.problems),
    ]


def run_verify(parser: Parser) -> int:
    """Check every file; the exit code says whether all are right."""
    add = parser.add_argument
    add_source(parser)
    add("--deep", action="store_true", help="read all tokens, not only checksums or headers")
    add("--vocabulary", type=count, metavar="N", help="ids that the model knows (with --deep)")
    arguments = parser.read()
    from refocused.prepare.verify_data import verify_data

    if arguments.vocabulary is not None and not arguments.deep:
        raise ConfigError("--vocabulary: ids are only read with --deep. Add it.")
    bucket, data = open_source(arguments)
    with progress_line("verify") as show:
        findings = verify_data(
            bucket, data, deep=arguments.deep, vocabulary=arguments.vocabulary, progress=show
        )
    bad = [finding.problem for finding in findings if finding.problem is not None]
    lines = bad[:_NAMED]
    if len(bad) > _NAMED:
        lines.append(f"and {len(bad) - _NAMED:,} more; --json names all")
    size = size_text(sum(finding.size for finding in findings))
    tokens = sum(finding.tokens or 0 for finding in findings)
    right = f"{len(findings) - len(bad):,} of {len(findings):,} files are right"
    lines.append(f"{arguments.source}: {right} ({size}, {tokens:,} tokens)")
    record = [dataclasses.asdict(finding) for finding in findings]
    print_result(record, lines, as_json=arguments.json)
    return ExitCode.CHECK_FAILED if bad else ExitCode.OK


def run_manifest(parser: Parser) -> None:
    """Read the headers of all files, and print or store the list of them."""
    add_source(parser, json_help="print the manifest's text")
    stored = parser.add_mutually_exclusive_group()
    stored.add_argument("--write", action="store_true", help="store it beside the files")
    text = "add the files that the stored one does not list"
    stored.add_argument("--update", action="store_true", help=text)
    arguments = parser.read()
    from refocused.data.formats.object_names import MANIFEST_NAME
    from refocused.data.manifest.shard_manifest import (
        build_manifest,
        manifest_to_json,
        read_manifest,
        write_manifest,
    )

    bucket, data = open_source(arguments)
    if arguments.update:
        manifest, lines = _updated_manifest(bucket, data)
    else:
        # The files' own headers are read, whatever an earlier manifest says.
        data = data.model_copy(update={"exclude": (*data.exclude, MANIFEST_NAME)})
        manifest = build_manifest(bucket, data, cache_file=None)
        if bucket.info(MANIFEST_NAME) is not None:
            manifest = _with_known(manifest, read_manifest(bucket))
        if arguments.write:
            manifest = _with_checksums(bucket, manifest)
            write_manifest(bucket, manifest)
        lines = [
            f"{len(manifest.shards):,} files, {size_text(manifest_bytes(manifest))}",
            f"  {manifest.tokens:,} tokens, tokenizer {manifest.tokenizer}",
            f"  fingerprint {manifest.fingerprint[:16]}",
        ]
    if arguments.json:
        print(manifest_to_json(manifest), end="")
        return
    print(f"{arguments.source}: " + "\n".join(lines))
    if arguments.write:
        print(f"  written as {MANIFEST_NAME}", file=sys.stderr)


def _updated_manifest(bucket: Bucket, data: DataConfig) -> tuple[Manifest, list[str]]:
    """Add the files that the stored manifest does not list; return it and what changed."""
    from refocused.data.formats.object_names import MANIFEST_NAME
    from refocused.data.manifest.select_files import unlisted_names
    from refocused.data.manifest.shard_manifest import (
        check_tokenizer,
        describe_files,
        read_manifest,
        write_manifest,
    )

    listing = {blob.name: blob for blob in bucket.list()}
    if MANIFEST_NAME not in listing:
        raise ShardError(f"{bucket.url} has no {MANIFEST_NAME} to update. Make one with --write.")
    earlier = read_manifest(bucket)
    check_tokenizer(earlier, data, url=bucket.url)
    names = unlisted_names(listing, listed={shard.name for shard in earlier.shards}, data=data)
    lines = [f"{len(names):,} files are added to {len(earlier.shards):,}"]
    if not names:
        return earlier, lines
    added = describe_files(bucket, [listing[name] for name in names], data, cache_file=None)
    found = _with_checksums(bucket, dataclasses.replace(earlier, shards=added)).shards
    shards = sorted([*earlier.shards, *found], key=lambda shard: shard.name)
    manifest = dataclasses.replace(earlier, shards=tuple(shards))
    write_manifest(bucket, manifest)
    lines += [
        f"  {earlier.tokens:,} -> {manifest.tokens:,} tokens",
        f"  fingerprint {earlier.fingerprint[:16]} -> {manifest.fingerprint[:16]}",
        "  A run on these data goes on without the new files. Once it stops, its next start is",
        "  refused, unless --allow-change data lets it begin a new pass over all files.",
    ]
    return manifest, lines


def _with_known(manifest: Manifest, earlier: Manifest) -> Manifest:
    """Keep what headers do not say of files that an earlier manifest knows."""
    known = {(shard.name, shard.size, shard.tokens): shard for shard in earlier.shards}

    def completed(shard: Shard) -> Shard:
        row = known.get((shard.name, shard.size, shard.tokens), shard)
        return dataclasses.replace(shard, max_id=row.max_id, documents=row.documents)

    shards = tuple(completed(shard) for shard in manifest.shards)
    tokenizer = earlier.tokenizer if manifest.tokenizer == "unknown" else manifest.tokenizer
    vocabulary = earlier.vocabulary if tokenizer == earlier.tokenizer else None
    return dataclasses.replace(manifest, shards=shards, tokenizer=tokenizer, vocabulary=vocabulary)


def _with_checksums(bucket: Bucket, manifest: Manifest) -> Manifest:
    """Read the files that the store keeps no checksum of, so that the manifest can be relied on."""
    from refocused.bucket.stored import stored_crc32c

    total, done, shards = manifest_bytes(manifest), 0, []
    with progress_line("manifest") as show:
        for shard in manifest.shards:
            show(done, total)
            known = stored_crc32c(bucket, shard.blob)
            shards.append(dataclasses.replace(shard, crc32c=known, sample=None))
            done += shard.size
    return dataclasses.replace(manifest, shards=tuple(shards))


def run_sync(parser: Parser) -> None:
    """Fetch what the folder lacks."""
    add = parser.add_argument
    add("source", metavar="URL", help="gs:// address, or a folder")
    add("folder", type=Path, metavar="DIR", help="where the objects go")
    add("--max-files", type=count, metavar="N", help="the first N files of tokens or text")
    add("--include", action="append", default=[], metavar="GLOB", help="only these objects")
    add("--exclude", action="append", default=[], metavar="GLOB", help="not these objects")
    _add_moving_options(parser)
    arguments = parser.read()
    from refocused.prepare.sync import Selection, sync_folder

    selection = Selection(tuple(arguments.include), tuple(arguments.exclude), arguments.max_files)
    bucket, folder = place(arguments.source, arguments), arguments.folder
    move = functools.partial(sync_folder, bucket, folder, selection=selection)
    _move("sync", move, str(folder), arguments)


def run_upload(parser: Parser) -> None:
    """Store what the bucket lacks."""
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="what is stored; hidden files are left out")
    add("target", metavar="URL", help="gs:// address, or a folder")
    _add_moving_options(parser)
    arguments = parser.read()
    from refocused.prepare.sync import upload_folder

    bucket = place(arguments.target, arguments)
    move = functools.partial(upload_folder, arguments.folder, bucket)
    _move("upload", move, arguments.target, arguments)


def _add_moving_options(parser: Parser) -> None:
    parser.add_argument("--threads", type=count, default=8, metavar="N", help="at once (8)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_credentials(parser)


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
        verified = f"{result.size_only:,} of them only by size: their source keeps no checksums"
    lines = [f"{where}: {result.objects:,} objects, {size_text(result.bytes)}, {verified}"]
    if result.moved_objects:
        rate = size_text(result.moved_bytes / seconds)
        moved = f"{result.moved_objects:,} moved ({size_text(result.moved_bytes)}, {rate}/s)"
        lines.append(f"  {moved} in {duration_text(seconds)}, {kept:,} were there")
    record = dataclasses.asdict(result) | {"seconds": seconds}
    print_result(record, lines, as_json=arguments.json)
