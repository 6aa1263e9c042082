"""What is really stored: an object's checksum, or that of blocks of it, from store or bytes."""

from __future__ import annotations

import os

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


def known_content(bucket: Bucket, blob: BlobInfo) -> tuple[int | None, int | None]:
    """Return what is soon known of the content of an object that was listed without a checksum.

    Returns:
        The checksum that the store has of it, or None and that of blocks of it: 8 of 16 KiB, evenly
        spaced from its first byte to its last; all of it where it is not longer.

    Raises:
        BucketError: The object cannot be read.
    """
    path = bucket.local_file(blob)
    if path is None:
        found = bucket.info(blob.name)
        if found is not None and found.crc32c is not None:
            return found.crc32c, None
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
