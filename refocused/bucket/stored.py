"""What is stored: the checksum of an object, or of blocks of it, from the store or its bytes."""

from __future__ import annotations

import os

from refocused.bucket.bucket import BlobInfo, Bucket, extended_crc32c
from refocused.bucket.partial_files import disk_errors

READ_BYTES = 8 * 1024 * 1024  # of one request
SAMPLED_BLOCKS, SAMPLED_BLOCK_BYTES = 8, 16 * 1024


def with_checksum(bucket: Bucket, blob: BlobInfo) -> BlobInfo:
    """Return a listed object with its checksum, where the store keeps one.

    Listings of Google Cloud Storage leave it out for objects with customer-managed keys; the
    object's own description has it. An object that was replaced since is returned as listed.
    """
    if blob.crc32c is not None:
        return blob
    own = bucket.info(blob.name)
    if own is None or own.size != blob.size or blob.generation not in (None, own.generation):
        return blob
    return own


def stored_crc32c(bucket: Bucket, blob: BlobInfo) -> int:
    """Return an object's CRC-32C: the store's own, or that of its bytes where it keeps none."""
    known = with_checksum(bucket, blob).crc32c
    return crc32c_of_bytes(bucket, blob.name) if known is None else known


def crc32c_of_bytes(bucket: Bucket, name: str) -> int:
    """Read an object from its start to its end; return its CRC-32C."""
    checksum = start = 0
    while block := bucket.read(name, start=start, length=READ_BYTES):
        checksum = extended_crc32c(checksum, block)
        start += len(block)
    return checksum


def is_stored(bucket: Bucket, name: str, *, size: int, crc32c: int) -> bool:
    """Whether the bucket has an object of this name with exactly these bytes."""
    blob = bucket.info(name)
    return blob is not None and blob.size == size and stored_crc32c(bucket, blob) == crc32c


def known_content(bucket: Bucket, blob: BlobInfo) -> tuple[int | None, int | None]:
    """Return what can be known quickly of the content of an object listed without a checksum.

    Returns:
        The checksum that the store has of it, or None and that of blocks of it: 8 of 16 KiB, evenly
        spaced from its first byte to its last; all of it where it is not longer.
    """
    path = bucket.local_file(blob)
    if path is None and (known := with_checksum(bucket, blob).crc32c) is not None:
        return known, None
    starts, length = [0], SAMPLED_BLOCKS * SAMPLED_BLOCK_BYTES
    if blob.size > length:
        last, length = blob.size - SAMPLED_BLOCK_BYTES, SAMPLED_BLOCK_BYTES
        starts = [last * number // (SAMPLED_BLOCKS - 1) for number in range(SAMPLED_BLOCKS)]
    sample = 0
    if path is None:
        for start in starts:
            sample = extended_crc32c(sample, bucket.read(blob.name, start=start, length=length))
        return None, sample
    with disk_errors(path), path.open("rb", buffering=0) as file:
        for start in starts:
            sample = extended_crc32c(sample, os.pread(file.fileno(), length, start))
    return None, sample
