"""Describe a set of token files, add new ones to its manifest, and choose validation files."""

import dataclasses
import hashlib
from collections.abc import Callable

from refocused.bucket.bucket import Bucket, stored_crc32c
from refocused.config.data import DataConfig
from refocused.data.formats.object_names import MANIFEST_NAME
from refocused.data.manifest.shard_manifest import (
    Manifest,
    Shard,
    build_manifest,
    check_tokenizer,
    describe_files,
    read_manifest,
    unlisted_names,
    write_manifest,
)
from refocused.system.errors import ShardError

MAX_FACTOR = 2.0  # between the requested share of validation and that of whole files
KEPT = ("max_id", "documents", "packed_for", "document_id")  # of a shard; headers do not say them


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


def describe_set(bucket: Bucket, data: DataConfig) -> tuple[Manifest, list[str]]:
    """Describe all files by their headers, with what a stored manifest says besides.

    Returns the manifest, and the names that only the stored one lists.
    """
    exclude = (*data.exclude, MANIFEST_NAME)  # read the headers, not the stored manifest
    manifest = build_manifest(bucket, data.model_copy(update={"exclude": exclude}))
    if bucket.info(MANIFEST_NAME) is None:
        return manifest, []
    earlier = read_manifest(bucket)
    known = {(shard.name, shard.size, shard.tokens): shard for shard in earlier.shards}

    def completed(shard: Shard) -> Shard:
        row = known.get((shard.name, shard.size, shard.tokens), shard)
        return dataclasses.replace(shard, **{name: getattr(row, name) for name in KEPT})

    shards = tuple(completed(shard) for shard in manifest.shards)
    gone = {shard.name for shard in earlier.shards} - {shard.name for shard in shards}
    tokenizer = earlier.tokenizer if manifest.tokenizer == "unknown" else manifest.tokenizer
    manifest = dataclasses.replace(manifest, shards=shards, tokenizer=tokenizer, vocabulary=None)
    if tokenizer == earlier.tokenizer:
        manifest = dataclasses.replace(earlier, shards=shards)
    return manifest, sorted(gone)


def add_files(
    bucket: Bucket, data: DataConfig, *, progress: Callable[[int, int], None]
) -> tuple[Manifest, Manifest, list[str]]:
    """Add the files that the stored manifest does not list; return it, the new one, their names.

    Raises:
        ShardError: There is no stored manifest, or it names another tokenizer.
    """
    listing = {blob.name: blob for blob in bucket.list()}
    if MANIFEST_NAME not in listing:
        raise ShardError(f"{bucket.url} has no {MANIFEST_NAME} to update. Make one with --write.")
    earlier = read_manifest(bucket)
    check_tokenizer(earlier, data, url=bucket.url)
    names = unlisted_names(listing, listed={shard.name for shard in earlier.shards}, data=data)
    if not names:
        return earlier, earlier, []
    blobs = [listing[name] for name in names]
    described = describe_files(bucket, blobs, data)
    added = with_checksums(
        bucket, dataclasses.replace(earlier, shards=described), progress=progress
    )
    shards = sorted([*earlier.shards, *added.shards], key=lambda shard: shard.name)
    manifest = dataclasses.replace(earlier, shards=tuple(shards))
    write_manifest(bucket, manifest)
    return earlier, manifest, names


def with_checksums(
    bucket: Bucket, manifest: Manifest, *, progress: Callable[[int, int], None]
) -> Manifest:
    """Compute the checksums that the store does not keep; report bytes done and bytes in all."""
    done, shards = 0, []
    for shard in manifest.shards:
        progress(done, manifest.bytes)
        checksum = stored_crc32c(bucket, shard.blob)
        shards.append(dataclasses.replace(shard, crc32c=checksum, sample=None))
        done += shard.size
    return dataclasses.replace(manifest, shards=tuple(shards))
