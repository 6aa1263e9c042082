"""A file-like view of a bucket's object, or of a zip member in it; fetches only what is read."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from isal import isal_zlib

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


# Deflate cannot do better than 1032 to 1 (zlib's technical notes); stored members are 1 to 1.
LARGEST_RATIO = 1040
LOCAL_HEADER_BYTES = 30  # before the member's name and extra field (APPNOTE.TXT, 4.3.7)
COMPRESSED_BYTES = 1 << 17  # read at a time: fewer changes of threads, and still in a core's cache
# Of one call: far above what tokens need, so that only a member of next to nothing reaches it. A
# call that stops earlier leaves compressed bytes over, a new size each time, and these tear the
# heap of the thread: it grew by 4 to 10 MiB over 32 shards.
INFLATED_BYTES = 1 << 20


@contextlib.contextmanager
def zip_faults_named(name: str) -> Iterator[None]:
    """Turn whatever a broken zip raises while it is read into a `ShardError` with its name."""
    try:
        yield
    except (  # type: ignore[misc]  # isal's stub names its exception as if it were an instance
        zipfile.BadZipFile,
        zlib.error,
        isal_zlib.error,
        struct.error,
        EOFError,
        NotImplementedError,  # a compression method that is unknown
        RuntimeError,  # an encrypted member
        OverflowError,
        OSError,  # a seek before the start: offsets that lie
        ValueError,  # the same from a file in memory; a member's name that is no text
    ) as error:
        raise ShardError(
            f"{name}: the zip file is truncated or corrupt ({error}). Write it again, or put its "
            "name in data.exclude."
        ) from None


@contextlib.contextmanager
def opened_zip(file: ByteSource, *, name: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip file; every fault of it inside the block becomes a `ShardError`."""
    with zip_faults_named(name), zipfile.ZipFile(file) as archive:
        yield archive


def member_reader(
    file: ByteSource, archive: zipfile.ZipFile, member: str, *, offset: int
) -> Callable[[int], bytes]:
    """Return the `read` of a member, from so many bytes after its beginning on.

    Like that of `zipfile`, it compares the member's CRC-32 where the member ends.
    """
    content = archive.open(member)  # refuses an encrypted member and a local header that lies
    if archive.getinfo(member).compress_type != zipfile.ZIP_DEFLATED:
        content.seek(offset)
        return content.read
    content.close()
    inflated = _Inflated(file, archive.getinfo(member))
    inflated.read(offset)
    return inflated.read


class _Inflated:
    """A deflated member, read by ISA-L: zlib's inflate is most of the cost of a first pass."""

    def __init__(self, file: ByteSource, info: zipfile.ZipInfo) -> None:
        file.seek(info.header_offset)
        name, extra = struct.unpack("<HH", file.read(LOCAL_HEADER_BYTES)[-4:])
        self._file = file
        self._info = info
        self._position = info.header_offset + LOCAL_HEADER_BYTES + name + extra
        self._end = self._position + info.compress_size
        self._left = info.file_size
        self._stream = isal_zlib.decompressobj(-zlib.MAX_WBITS)
        self._crc = 0
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        """Return so many bytes, fewer only at the member's end."""
        wanted = min(size, self._left)
        self._left -= wanted
        pieces = []
        while wanted:
            rest = self._rest or memoryview(self._inflate())
            pieces.append(rest[:wanted])
            self._rest = rest[wanted:]
            wanted -= len(pieces[-1])
        if not self._left and self._crc != self._info.CRC:
            raise zipfile.BadZipFile(f"Bad CRC-32 for file {self._info.filename!r}")
        return b"".join(pieces)

    def _inflate(self) -> bytes:
        compressed = self._stream.unconsumed_tail or self._compressed()
        piece = self._stream.decompress(compressed, INFLATED_BYTES)
        if not piece and not compressed:
            raise EOFError(f"the data of {self._info.filename!r} end early")
        self._crc = isal_zlib.crc32(piece, self._crc)
        return piece

    def _compressed(self) -> bytes:
        self._file.seek(self._position)  # another member of the same file may be read in turns
        content = self._file.read(min(COMPRESSED_BYTES, self._end - self._position))
        self._position += len(content)
        return content


def checked_member(archive: zipfile.ZipFile, member: str, *, name: str) -> zipfile.ZipInfo:
    """Return a member's entry when the size it claims can be true.

    Raises:
        ShardError: It claims more bytes than its compressed ones can hold.
    """
    info = archive.getinfo(member)
    if info.file_size > info.compress_size * LARGEST_RATIO:
        raise ShardError(
            f"{name}: its member {member} claims {info.file_size:,} bytes out of "
            f"{info.compress_size:,} compressed ones, which cannot be. Write the file again, or "
            "put its name in data.exclude."
        )
    return info
