"""The `Bucket` protocol, the description of an object, and its checksum."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

import google_crc32c

from refocused.system.errors import BucketError

BLOCK_BYTES = 256 * 1024  # stays in the processor's cache; each thread holds one


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


LONGEST_PART_BYTES = 250  # of a name; file systems take 255, and local forms append a suffix
TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{32}\.part")  # no object may have such a name
_NO_TEXT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # controls, halves of characters


@dataclasses.dataclass(frozen=True, slots=True)
class BlobInfo:
    """One object of a bucket, as a listing shows it."""

    name: str  # path below the bucket's prefix, with `/` between its parts
    size: int  # bytes
    crc32c: int | None = None  # of the whole content; None: the store (such as a folder) keeps none
    # The store's version of the object; in a folder, the time of its last change in ns since 1970.
    generation: int | None = None


class Bucket(Protocol):
    """An object store below one prefix: `gs://bucket/prefix` or a folder.

    Every method raises `BucketError` with the object's address and a way out, after retries where
    the fault may pass. Names are relative to the prefix.
    """

    url: str

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Yield every object whose name starts with the text `prefix`, sorted by name.

        `step_5` also yields `step_50/...`; end it with `/` to mean a folder.
        """
        ...

    def info(self, name: str) -> BlobInfo | None:
        """Describe one object, or return None when there is none of that name."""
        ...

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes from offset `start`; fewer when the object ends before."""
        ...

    def write(self, name: str, content: bytes, *, overwrite: bool = False) -> BlobInfo:
        """Store a small object; other bytes of that name are an error unless `overwrite`."""
        ...

    def download(self, blob: BlobInfo, target: Path) -> int:
        """Fetch a whole object to `target`, atomically and verified; return its CRC-32C."""
        ...

    def local_file(self, blob: BlobInfo) -> Path | None:
        """Return the object's file where it may be read in place of a download; None elsewhere."""
        ...

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        """Store a file under a new name; done already when the same bytes are there.

        `crc32c` is the checksum that the file must have, where it is known.
        """
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
    parts = name.split("/")
    leaves = not name or name.startswith("/") or not {".", ".."}.isdisjoint(parts)
    if leaves or re.search(r"[\\\0]", name) or ":" in PurePosixPath(name).parts[0]:
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


def described(size: int, crc32c: int | None) -> str:
    """Return size and checksum as messages show them."""
    return f"{size:,} bytes" + ("" if crc32c is None else f", crc32c {crc32c:#010x}")


def require_same(address: str, *, there: tuple[int, int], here: tuple[int, int]) -> None:
    """Check that an object has the size and checksum of what is to be stored.

    Raises:
        BucketError: It has others.
    """
    if there != here:
        raise BucketError(
            f"{address} already holds other bytes: {described(*there)} there, {described(*here)} "
            "here. Objects are not overwritten: delete it first, or choose another name."
        )


def require_checksum(source: Path, *, found: int, expected: int | None) -> None:
    """Check a file that was read against the checksum that it must have, where that is known.

    Raises:
        BucketError: It has another.
    """
    if expected not in (None, found):
        raise BucketError(
            f"{source}: crc32c {found:#010x} read, {expected:#010x} expected. "
            "The file changed or is damaged; it was not stored."
        )
