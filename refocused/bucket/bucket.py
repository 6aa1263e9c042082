"""The `Bucket` protocol, object descriptions, names and checksums."""

import dataclasses
import functools
import hashlib
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import google_crc32c

from refocused.system.atomic_files import MAX_DESCRIPTION_BYTES, open_regular
from refocused.system.errors import BucketError

BLOCK_BYTES = 256 * 1024  # fits the processor's cache
READ_BYTES = 8 * 1024 * 1024  # per request, to compute a checksum
ANONYMOUS = "an anonymous client (no credentials were found)"


def crc32c_of(path: Path) -> int:
    """Return the CRC-32C (Castagnoli, RFC 3720) of a file."""
    return functools.reduce(extended_crc32c, blocks_of(path), 0)


def blocks_of(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file."""
    with open_regular(path) as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def extended_crc32c(checksum: int, content: bytes) -> int:
    """Extend the CRC-32C of some bytes by the bytes that follow them."""
    return int(google_crc32c.extend(checksum, content))


MAX_PART_BYTES = 250  # of a name; file systems allow 255, and local forms append a suffix
TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{32}\.part")  # reserved: no object may have such a name
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclasses.dataclass(frozen=True, slots=True)
class BlobInfo:
    """One object of a bucket, as listed."""

    name: str  # path below the bucket's prefix, with `/` between its parts
    size: int  # bytes
    crc32c: int | None = None  # of the whole content; None where the store (a folder) keeps none
    generation: str | None = None  # the store's version; in a folder, mtime in ns since 1970
    # Of an object without `crc32c`, another checksum of the whole content, such as `sha1 HEX`, or
    # `etag HEX`, most likely an MD5; empty if the store keeps none. None: unknown, as in a listing.
    checksum: str | None = dataclasses.field(default=None, compare=False)

    @property
    def version(self) -> str:
        """Identify the content among objects of this name: by CRC-32C, else the store's version."""
        if self.crc32c is not None:
            return f"crc32c {self.crc32c}"
        return f"size {self.size}, generation {self.generation}"


class UndescribedBlob(BlobInfo):
    """A listed object that cannot be used: its `size` raises the error that says why.

    So it may be left out by its name, like any other.
    """

    __slots__ = ("error",)
    error: BucketError

    def __init__(self, name: str, error: BucketError) -> None:
        values = {"name": name, "error": error, "crc32c": None, "generation": None}
        for field, value in (values | {"checksum": None}).items():
            object.__setattr__(self, field, value)

    @property
    def size(self) -> int:
        """Raise the error."""
        raise self.error


class Bucket(Protocol):
    """An object store below one prefix: `gs://bucket/prefix` or a folder.

    Every method raises `BucketError` with the object's address and a remedy, after retries if the
    fault is transient. Names are relative to the prefix.
    """

    url: str

    @property
    def endpoint(self) -> str | None:
        """Address of the store's server; None for a folder."""

    @property
    def identity(self) -> str | None:
        """Whose credentials are used, for messages; None for a folder."""

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Yield every object whose name starts with the text `prefix`, sorted by name.

        One that cannot be used is an `UndescribedBlob`. `step_5` also matches `step_50/...`; end
        the prefix with `/` to list a folder.
        """

    def info(self, name: str) -> BlobInfo | None:
        """Describe one object; None if it does not exist."""

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes from offset `start`, fewer at the object's end."""

    def write(self, name: str, content: bytes, *, overwrite: bool | str = False) -> BlobInfo:
        """Store a small object. Other bytes of that name are an error unless `overwrite`.

        `overwrite` may be the only generation to replace: of concurrent writers, one succeeds.
        """

    def age_s(self, name: str) -> float:
        """Return the seconds since an object was written, by the store's clock.

        0 in a folder, whose files are dated by the clocks of machines.
        """

    def download(self, blob: BlobInfo, target: Path) -> int:
        """Download an object to `target`, atomically and verified; return its CRC-32C."""

    def local_file(self, blob: BlobInfo) -> Path | None:
        """Return the object's file if it can be read in place of a download."""

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        """Store a file under a new name; no-op if the object already has the same bytes.

        `crc32c` is the file's expected checksum, if known.
        """

    def delete(self, name: str) -> None:
        """Remove one object, if it exists."""


def checked_name(name: str, *, where: str) -> str:
    """Return an object's name; raise `BucketError` if a file below a folder cannot have it."""
    parts = name.split("/")
    leaves = not name or name.startswith("/") or not {".", ".."}.isdisjoint(parts)
    if leaves or re.search(r"[\\\0]", name) or ":" in parts[0]:
        problem = "would be written outside its folder"
    elif name.endswith("/"):
        problem = "is that of a folder"
    elif _UNPRINTABLE.search(name):
        problem = "contains control characters or lone surrogates"
    elif any(len(part.encode()) > MAX_PART_BYTES for part in parts):
        problem = f"has a part longer than {MAX_PART_BYTES} bytes, too long for a file"
    elif any(TEMPORARY_NAME.fullmatch(part) for part in parts):
        problem = "is reserved for this program's temporary files"
    else:
        return name
    raise BucketError(
        f"{where}: the object name {name!r} {problem}. Rename the object in the bucket, or "
        "exclude it."
    )


def size_and_checksum(size: int, crc32c: int | None) -> str:
    """Format size and checksum for a message."""
    return f"{size:,} bytes" + ("" if crc32c is None else f", crc32c {crc32c:#010x}")


def require_same(address: str, *, there: tuple[int, int], here: tuple[int, int]) -> None:
    """Raise `BucketError` unless an existing object has the size and checksum to be stored."""
    if there != here:
        raise BucketError(
            f"{address} already holds other bytes: {size_and_checksum(*there)}, not "
            f"{size_and_checksum(*here)}. Delete it first, or choose another name."
        )


def require_checksum(source: Path, *, found: int, expected: int | None) -> None:
    """Raise `BucketError` if a file that was read does not have its expected checksum."""
    if expected not in (None, found):
        raise BucketError(
            f"{source}: crc32c {found:#010x} read, {expected:#010x} expected. The file changed or "
            "is damaged, and was not stored. Restore it, or store it without the old checksum."
        )


def with_checksum(bucket: Bucket, blob: BlobInfo) -> BlobInfo:
    """Return a listed object with its checksum, if the store keeps one.

    Listings of S3 omit it, and those of Google Cloud Storage for objects with customer-managed
    keys; the object's own resource has it. An object replaced since the listing is returned as
    listed.
    """
    if blob.crc32c is not None or blob.checksum is not None:
        return blob
    now = bucket.info(blob.name)
    if now is None or now.size != blob.size or blob.generation not in (None, now.generation):
        return blob
    return now


def has_checksum(blob: BlobInfo, blocks: Iterable[bytes]) -> bool:
    """Whether bytes have an object's other `checksum`; True if it has none."""
    algorithm, _, expected = (blob.checksum or "").partition(" ")
    if algorithm in ("crc32", "crc64nvme"):
        module = "zlib" if algorithm == "crc32" else "awscrt.checksums"
        extend = getattr(importlib.import_module(module), algorithm)
        computed = functools.reduce(lambda value, block: extend(block, value), blocks, 0)
        return computed == int(expected, 16)
    if algorithm:
        digest = hashlib.new("md5" if algorithm == "etag" else algorithm, usedforsecurity=False)
        for block in blocks:
            digest.update(block)
        return digest.hexdigest() == expected
    return True


def is_same_file(bucket: Bucket, blob: BlobInfo, path: Path, *, crc32c: int) -> bool:
    """Whether a file of this CRC-32C equals an object, which is read if no checksum says so."""
    if path.stat().st_size != blob.size:
        return False
    blob = with_checksum(bucket, blob)
    if blob.crc32c is None and blob.checksum and has_checksum(blob, blocks_of(path)):
        return True
    return crc32c == stored_crc32c(bucket, blob)


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


def require_description(address: str, size: int) -> None:
    """Raise `BucketError` for bytes that do not fit into memory, as those of no description do."""
    if size > MAX_DESCRIPTION_BYTES:
        raise BucketError(
            f"{address}: {size:,} bytes are not read at once; a description or manifest has at "
            f"most {MAX_DESCRIPTION_BYTES:,}. Remove the object, or correct the address."
        )


def is_stored(bucket: Bucket, name: str, *, size: int, crc32c: int) -> bool:
    """Whether the bucket has an object of this name, size and checksum."""
    blob = bucket.info(name)
    return blob is not None and blob.size == size and stored_crc32c(bucket, blob) == crc32c
