"""CRC-32C of files: the one checksum that every object of a bucket has."""

from __future__ import annotations

import base64
from pathlib import Path

import google_crc32c

BLOCK_BYTES = 256 * 1024  # stays in the processor's cache, and is held once by each thread


def crc32c_of(path: Path) -> int:
    """Return the CRC-32C (Castagnoli, RFC 3720) of a whole file, read in blocks.

    Raises:
        OSError: The file cannot be read.
    """
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            checksum = google_crc32c.extend(checksum, block)
    return checksum


def extended_crc32c(checksum: int, content: bytes) -> int:
    """Return the CRC-32C of bytes whose checksum is `checksum`, followed by `content`."""
    return int(google_crc32c.extend(checksum, content))


def crc32c_to_base64(checksum: int) -> str:
    """Spell a checksum as Google Cloud Storage does: base64 of four big-endian bytes."""
    return base64.b64encode(checksum.to_bytes(4, "big")).decode("ascii")


def crc32c_from_base64(text: str) -> int:
    """Read a checksum as Google Cloud Storage spells it.

    Raises:
        ValueError: It is not four bytes in base64.
    """
    content = base64.b64decode(text, validate=True)
    if len(content) != 4:
        raise ValueError(f"{text!r} is no CRC-32C")
    return int.from_bytes(content, "big")
