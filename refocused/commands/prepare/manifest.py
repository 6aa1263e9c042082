"""`prepare_data manifest`: list token files, and store or update the list."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser
from refocused.commands.output import progress_line, size_text
from refocused.commands.prepare.make_shards import add_source, manifest_bytes, open_source
from refocused.system.errors import ExitCode, ShardError

if TYPE_CHECKING:
    from refocused.bucket.bucket import Bucket
    from refocused.config.data import DataConfig
    from refocused.data.manifest.shard_manifest import Manifest


def run_manifest(parser: Parser) -> int:
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
        return ExitCode.OK
    print(f"{arguments.source}: " + "\n".join(lines))
    if arguments.write:
        print(f"  written as {MANIFEST_NAME}", file=sys.stderr)
    return ExitCode.OK


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

    total, done, shards = manifest_bytes(manifest), 0, []
    with progress_line("manifest") as show:
        show(done, total)
        for shard in manifest.shards:
            known = stored_crc32c(bucket, shard.blob)
            shards.append(dataclasses.replace(shard, crc32c=known, sample=None))
            done += shard.size
            show(done, total)
    return dataclasses.replace(manifest, shards=tuple(shards))
