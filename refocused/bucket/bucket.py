"""The `Bucket` protocol, the description of an object, and its checksum."""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

import google_crc32c

from refocused.system.errors import BucketError

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


LONGEST_PART_BYTES = 250  # of a name; file systems take 255, and local forms append a suffix
TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{32}\.part")  # no object may have such a name
_NO_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # controls, halves of characters


@dataclasses.dataclass(frozen=True, slots=True)
class BlobInfo:
    """One object of a bucket, as a listing shows it.

    Attributes:
        name: Path below the bucket's prefix, with `/` between its parts.
        size: Bytes.
        crc32c: CRC-32C (Castagnoli) of the whole content as an unsigned integer; None where the
            store does not keep one (a folder does not).
        generation: The store's version of the object (in a folder, when the file was last changed,
            in ns since 1970); None where it is not known.
    """

    name: str
    size: int
    crc32c: int | None = None
    generation: int | None = None


class Bucket(Protocol):
    """An object store below one prefix: `gs://bucket/prefix` or a folder.

    Every method raises `BucketError` with the object's address and a way out, after retries where
    the fault may pass. Names are relative to the prefix.
    """

    url: str

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Yield every object whose name starts with `prefix`, sorted by name, over all pages."""
        ...

    def info(self, name: str) -> BlobInfo | None:
        """Describe one object, or return None when there is none of that name."""
        ...

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes from offset `start` (all that follow when None)."""
        ...

    def write(self, name: str, content: bytes, *, overwrite: bool = False) -> BlobInfo:
        """Store a small object; an existing one of that name is kept unless `overwrite`."""
        ...

    def download(self, blob: BlobInfo, target: Path) -> int:
        """Fetch a whole object to `target`, atomically and verified; return its CRC-32C."""
        ...

    def local_file(self, blob: BlobInfo) -> Path | None:
        """Return the object's file where it may be read in place of a download; None elsewhere."""
        ...

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        """Store a file under a new name; done already when the same bytes are there."""
        ...

    def delete(self, name: str) -> None:
        """Remove one object; absent is fine."""
        ...


def checked_name(name: str, *, where: str) -> str:
    """Return an object's name when it can be that of a file below a folder.

    Raises:
        BucketError: The name is empty, absolute, holds `..`, a backslash, a NUL or a drive, has a
            part that is too long, holds control characters, or is one of our temporary names.
    """
    path = PurePosixPath(name)
    parts = name.split("/")
    if (
        not name
        or name.startswith("/")
        or "\\" in name
        or "\0" in name
        or ":" in (path.parts[0] if path.parts else "")
        or any(part in ("..", ".") for part in parts)
    ):
        problem = "would be written outside its folder"
    elif _NO_TEXT.search(name):
        problem = "is no plain text"
    elif any(len(part.encode()) > LONGEST_PART_BYTES for part in parts):
        problem = f"has a part above {LONGEST_PART_BYTES} bytes, too long for a file"
    elif any(TEMPORARY_NAME.fullmatch(part) for part in parts):
        problem = "is that of a temporary file of this program"
    else:
        return name
    raise BucketError(
        f"{where}: the object name {name!r} {problem}. Rename the object in the bucket, or "
        "exclude it."
    )
