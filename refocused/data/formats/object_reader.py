"""A file-like view of one object of a bucket that fetches only the ranges that are read."""

from __future__ import annotations

import io
from typing import Protocol

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.system.errors import ShardError

FIRST_RANGE_BYTES = 64 * 1024  # holds the directory of a zip of a few members
LARGEST_RANGE_BYTES = 8 * 1024 * 1024
LARGEST_READ_BYTES = 32 * 1024 * 1024
RANGES_KEPT = 4  # a mask and its ids are read side by side


class ByteSource(Protocol):
    """What the readers of token files need: an open local file, or an `ObjectReader`."""

    def read(self, size: int = ..., /) -> bytes:
        """Return up to `size` bytes from the position."""
        ...

    def seek(self, offset: int, whence: int = ..., /) -> int:
        """Move the position."""
        ...

    def tell(self) -> int:
        """Return the position."""
        ...

    def seekable(self) -> bool:
        """Whether the position can be moved: always."""
        ...


class ObjectReader:
    """Reads an object by ranges: 64 KiB where it jumps, up to 8 MiB where it reads on."""

    def __init__(self, bucket: Bucket, blob: BlobInfo) -> None:
        self._bucket = bucket
        self._blob = blob
        self._position = 0
        self._ranges: list[tuple[int, bytes]] = []

    def seekable(self) -> bool:
        """Whether the position can be moved: always."""
        return True

    def tell(self) -> int:
        """Return the position in bytes from the start."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position as `io.IOBase.seek` does."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._blob.size}
        position = base[whence] + offset
        if position < 0:  # the exception that zipfile expects of a file shorter than its footer
            raise OSError(f"{self._blob.name}: seek to {position}, before the start")
        self._position = position
        return position

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, fewer only at the end of the object.

        Raises:
            ShardError: More than 32 MiB are asked for at once, which only a header that lies does.
        """
        left = max(self._blob.size - self._position, 0)
        size = left if size < 0 else min(size, left)
        if size > LARGEST_READ_BYTES:
            raise ShardError(
                f"{self._blob.name}: its header asks for {size:,} bytes at once, which no token "
                "file needs. Write the file again, or put its name in data.exclude."
            )
        pieces = []
        while size:
            piece = self._piece(size)
            pieces.append(piece)
            self._position += len(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _piece(self, size: int) -> bytes:
        for start, content in self._ranges:
            offset = self._position - start
            if 0 <= offset < len(content):
                return content[offset : offset + size]
        return self._fetch()[self._position - self._ranges[-1][0] :][:size]

    def _fetch(self) -> bytes:
        start, length = self._position, FIRST_RANGE_BYTES
        for known in self._ranges:
            if known[0] + len(known[1]) == start:  # read on: ask for more each time
                length = min(2 * len(known[1]), LARGEST_RANGE_BYTES)
                self._ranges.remove(known)
                break
        else:  # the end is read backwards: footer, then directory
            start = min(start, max(self._blob.size - FIRST_RANGE_BYTES, 0))
        length = min(max(length, FIRST_RANGE_BYTES), self._blob.size - start)
        content = self._bucket.read(self._blob.name, start=start, length=length)
        if len(content) != length:
            raise ShardError(
                f"{self._blob.name}: {len(content):,} bytes came where the listing promised "
                f"{length:,}; the object changed or is truncated. Start again to list it anew, "
                "or put its name in data.exclude."
            )
        self._ranges = [*self._ranges[-(RANGES_KEPT - 1) :], (start, content)]
        return content
