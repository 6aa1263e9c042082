"""What is really stored: an object's checksum, or that of blocks of it, from store or bytes."""

from __future__ import annotations

import os
from pathlib import Path

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.checksum import BLOCK_BYTES, extended_crc32c
from refocused.bucket.part_file import disk_errors

SAMPLED_BLOCKS, SAMPLED_BLOCK_BYTES = 8, 16 * 1024


def stored_crc32c(bucket: Bucket, blob: BlobInfo) -> int:
    """Return an object's CRC-32C: the store's own, or that of its bytes where it keeps none.

    Raises:
        BucketError: The object cannot be read.
    """
    if blob.crc32c is not None:
        return blob.crc32c
    checksum = start = 0
    while block := bucket.read(blob.name, start=start, length=BLOCK_BYTES):
        checksum = extended_crc32c(checksum, block)
        start += len(block)
    return checksum


def is_stored(bucket: Bucket, name: str, *, size: int, crc32c: int) -> bool:
    """Whether the bucket has an object of this name with exactly these bytes."""
    blob = bucket.info(name)
    return blob is not None and blob.size == size and stored_crc32c(bucket, blob) == crc32c


def sampled_crc32c(bucket: Bucket, blob: BlobInfo, path: Path | None) -> int:
    """Return the CRC-32C of blocks of an object that no checksum is known of.

    They are 8 of 16 KiB, evenly spaced, from its first byte to its last; all of it where it is not
    longer than they are together.

    Args:
        bucket: Where it is.
        blob: The object.
        path: What `local_file` returns for it.

    Raises:
        BucketError: The object cannot be read.
    """
    starts, length = [0], SAMPLED_BLOCKS * SAMPLED_BLOCK_BYTES
    if blob.size > length:
        last, length = blob.size - SAMPLED_BLOCK_BYTES, SAMPLED_BLOCK_BYTES
        starts = [last * number // (SAMPLED_BLOCKS - 1) for number in range(SAMPLED_BLOCKS)]
    checksum = 0
    if path is None:
        for start in starts:
            checksum = extended_crc32c(checksum, bucket.read(blob.name, start=start, length=length))
        return checksum
    with disk_errors(path), path.open("rb", buffering=0) as file:
        for start in starts:
            checksum = extended_crc32c(checksum, os.pread(file.fileno(), length, start))
    return checksum
