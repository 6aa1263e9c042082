"""What is really stored: the checksum of an object, from the store or from its bytes."""

from __future__ import annotations

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.checksum import BLOCK_BYTES, extended_crc32c


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
