"""`prepare_data verify` and `manifest`: whether files are right, and the list of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from refocused.commands.arguments import (
    Parser,
    add_credentials,
    add_reading_options,
    data_settings,
    place,
)
from refocused.commands.output import ProgressLine, count, size_text
from refocused.system.errors import ExitCode

if TYPE_CHECKING:
    from refocused.bucket.bucket import Bucket
    from refocused.config.data import DataConfig
    from refocused.data.manifest.shard_manifest import Manifest

_NAMED = 20


def add_verify_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("source", metavar="DIR_OR_URL", help="folder or gs:// address of token files")
    add("--deep", action="store_true", help="read all tokens, not only checksums or headers")
    add("--vocabulary", type=count, metavar="N", help="ids that the model knows (with --deep)")
    add("--json", action="store_true", help="print JSON")
    add_reading_options(parser)
    add_credentials(parser)


def run_verify(arguments: argparse.Namespace) -> int:
    """Check every file; the exit code says whether all are right."""
    from refocused.prepare.verify_data import verify_data
    from refocused.system.errors import ConfigError

    if arguments.vocabulary is not None and not arguments.deep:
        raise ConfigError("--vocabulary: ids are only read with --deep. Add it.")
    line = ProgressLine("verify")
    try:
        findings = verify_data(
            place(arguments.source, arguments),
            data_settings(arguments, arguments.source),
            deep=arguments.deep,
            vocabulary=arguments.vocabulary,
            progress=line.show,
        )
    finally:
        line.end()
    bad = [finding.problem for finding in findings if finding.problem is not None]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    else:
        for problem in bad[:_NAMED]:
            print(problem)
        if len(bad) > _NAMED:
            print(f"and {len(bad) - _NAMED:,} more; --json names all")
        size = size_text(sum(finding.size for finding in findings))
        tokens = sum(finding.tokens or 0 for finding in findings)
        right = len(findings) - len(bad)
        print(f"{arguments.source}: {right:,} of {len(findings):,} files are right", end="")
        print(f" ({size}, {tokens:,} tokens)")
    return ExitCode.CHECK_FAILED if bad else ExitCode.OK


def add_manifest_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("source", metavar="DIR_OR_URL", help="folder or gs:// address of token files")
    stored = parser.add_mutually_exclusive_group()
    stored.add_argument("--write", action="store_true", help="store it beside the files")
    stored.add_argument(
        "--update", action="store_true", help="add the files that the stored one does not list"
    )
    add("--json", action="store_true", help="print the manifest's text")
    add_reading_options(parser)
    add_credentials(parser)


def run_manifest(arguments: argparse.Namespace) -> int:
    """Read the headers of all files, and print or store the list of them."""
    from refocused.data.formats.object_names import MANIFEST_NAME
    from refocused.data.manifest.shard_manifest import (
        build_manifest,
        manifest_to_json,
        read_manifest,
        write_manifest,
    )

    bucket = place(arguments.source, arguments)
    data = data_settings(arguments, arguments.source)
    if arguments.update:
        return _update(bucket, data, arguments)
    # The files' own headers are asked, whatever an earlier manifest says.
    data = data.model_copy(update={"exclude": (*data.exclude, MANIFEST_NAME)})
    manifest = build_manifest(bucket, data, cache_file=None)
    if bucket.info(MANIFEST_NAME) is not None:
        manifest = _with_known(manifest, read_manifest(bucket))
    if arguments.write:
        manifest = _with_checksums(bucket, manifest)
        write_manifest(bucket, manifest)
    if arguments.json:
        print(manifest_to_json(manifest), end="")
        return ExitCode.OK
    size = size_text(sum(shard.size for shard in manifest.shards))
    print(f"{arguments.source}: {len(manifest.shards):,} files, {size}")
    print(f"  {manifest.tokens:,} tokens, tokenizer {manifest.tokenizer}")
    print(f"  fingerprint {manifest.fingerprint[:16]}")
    if arguments.write:
        print(f"  written as {MANIFEST_NAME}", file=sys.stderr)
    return ExitCode.OK


def _update(bucket: Bucket, data: DataConfig, arguments: argparse.Namespace) -> int:
    """Add the files that the stored manifest does not list; the rows of the others stay."""
    from refocused.data.formats.object_names import MANIFEST_NAME
    from refocused.data.manifest.select_files import unlisted_names
    from refocused.data.manifest.shard_manifest import (
        check_tokenizer,
        describe_files,
        manifest_to_json,
        read_manifest,
        write_manifest,
    )
    from refocused.system.errors import ShardError

    listing = {blob.name: blob for blob in bucket.list()}
    if MANIFEST_NAME not in listing:
        raise ShardError(f"{bucket.url} has no {MANIFEST_NAME} to update. Make one with --write.")
    earlier = read_manifest(bucket)
    check_tokenizer(earlier, data, url=bucket.url)
    names = unlisted_names(listing, listed={shard.name for shard in earlier.shards}, data=data)
    added = describe_files(bucket, [listing[name] for name in names], data, cache_file=None)
    found = _with_checksums(bucket, dataclasses.replace(earlier, shards=added)).shards
    shards = sorted([*earlier.shards, *found], key=lambda shard: shard.name)
    manifest = dataclasses.replace(earlier, shards=tuple(shards))
    if names:
        write_manifest(bucket, manifest)
    if arguments.json:
        print(manifest_to_json(manifest), end="")
        return ExitCode.OK
    print(f"{arguments.source}: {len(names):,} files are added to {len(earlier.shards):,}")
    if names:
        print(f"  {earlier.tokens:,} -> {manifest.tokens:,} tokens")
        print(f"  fingerprint {earlier.fingerprint[:16]} -> {manifest.fingerprint[:16]}")
        print(
            "  A run on these data goes on without the new files. Once it stops, its next start is"
        )
        print("  refused, unless --allow-change data lets it begin a new pass over all files.")
    return ExitCode.OK


def _with_known(manifest: Manifest, earlier: Manifest) -> Manifest:
    """Keep what headers do not say of files that an earlier manifest knows."""
    known = {(shard.name, shard.size, shard.tokens): shard for shard in earlier.shards}
    shards = []
    for shard in manifest.shards:
        row = known.get((shard.name, shard.size, shard.tokens))
        if row is not None:
            shard = dataclasses.replace(shard, max_id=row.max_id, documents=row.documents)
        shards.append(shard)
    named = earlier if manifest.tokenizer == "unknown" else manifest
    same = named.tokenizer == earlier.tokenizer
    return dataclasses.replace(
        manifest,
        shards=tuple(shards),
        tokenizer=named.tokenizer,
        vocabulary=earlier.vocabulary if same else None,
    )


def _with_checksums(bucket: Bucket, manifest: Manifest) -> Manifest:
    """Read the files that the store keeps no checksum of, so that the manifest can be relied on."""
    from refocused.bucket.stored import stored_crc32c

    line = ProgressLine("manifest")
    total = sum(shard.size for shard in manifest.shards)
    shards, done = [], 0
    line.show(done, total)
    for shard in manifest.shards:
        known = stored_crc32c(bucket, shard.blob)
        shards.append(dataclasses.replace(shard, crc32c=known, sample=None))
        done += shard.size
        line.show(done, total)
    line.end()
    return dataclasses.replace(manifest, shards=tuple(shards))
