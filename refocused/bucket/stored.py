"""Checksums of stored objects, from the store or from their bytes."""

import os

from refocused.bucket.bucket import BlobInfo, Bucket, extended_crc32c
from refocused.bucket.partial_files import disk_errors

READ_BYTES = 8 * 1024 * 1024  # per request
SAMPLED_BLOCKS, SAMPLED_BLOCK_BYTES = 8, 16 * 1024


def with_checksum(bucket: Bucket, blob: BlobInfo) -> BlobInfo:
    """Return a listed object with its checksum, if the store keeps one.

    Listings of Google Cloud Storage omit it for objects with customer-managed keys; the object's
    own resource has it. An object replaced since the listing is returned as listed.
    """
    if blob.crc32c is not None:
        return blob
    own = bucket.info(blob.name)
    if own is None or own.size != blob.size or blob.generation not in (None, own.generation):
        return blob
    return own


def stored_crc32c(bucket: Bucket, blob: BlobInfo) -> int:
    """Return an object's CRC-32C: the store's, or computed from its bytes where it keeps none."""
    known = with_checksum(bucket, blob).crc32c
    return crc32c_of_bytes(bucket, blob.name) if known is None else known


def crc32c_of_bytes(bucket: Bucket, name: str) -> int:
    """Read a whole object, and return its CRC-32C."""
    checksum = start = 0
    while block := bucket.read(name, start=start, length=READ_BYTES):
        checksum = extended_crc32c(checksum, block)
        start += len(block)
    return checksum


def is_stored(bucket: Bucket, name: str, *, size: int, crc32c: int) -> bool:
    """Whether the bucket has an object of this name, size and checksum."""
    blob = bucket.info(name)
    return blob is not None and blob.size == size and stored_crc32c(bucket, blob) == crc32c


def known_content(bucket: Bucket, blob: BlobInfo) -> tuple[int | None, int | None]:
    """Return a quickly computed identity of an object that was listed without a checksum.

    Returns:
        The store's CRC-32C and None; or None and the CRC-32C of a sample: 8 blocks of 16 KiB,
        evenly spaced from the first byte to the last, or all of a shorter object.
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
