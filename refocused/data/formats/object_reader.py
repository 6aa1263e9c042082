"""A file-like view of a bucket's object, or of a zip member in it; fetches only what is read."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator

from isal import isal_zlib

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.data.formats.object_names import unusable
from refocused.system.errors import ShardError

FIRST_RANGE_BYTES = 64 * 1024  # holds the directory of a zip of a few members
LARGEST_RANGE_BYTES = 8 * 1024 * 1024
LARGEST_READ_BYTES = 32 * 1024 * 1024
RANGES_KEPT = 4  # a mask and its ids are read side by side

# Deflate cannot do better than 1032 to 1 (zlib's technical notes); stored members are 1 to 1.
LARGEST_RATIO = 1040
LOCAL_HEADER_BYTES = 30  # before the member's name and extra field (APPNOTE.TXT, 4.3.7)
COMPRESSED_BYTES = 1 << 17  # read at a time: fewer changes of threads, and still in a core's cache
# Of one call: far above what tokens need, so that only a member of next to nothing reaches it. A
# call that stops earlier leaves compressed bytes over, a new size each time, and these tear the
# heap of the thread: it grew by 4 to 10 MiB over 32 shards.
INFLATED_BYTES = 1 << 20

ByteSource = io.BufferedIOBase  # an open local file, or an `ObjectReader`


class ObjectReader(io.BufferedIOBase):
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

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the position as `io.IOBase.seek` does."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._blob.size}
        position = base[whence] + offset
        if position < 0:  # the exception that zipfile expects of a file shorter than its footer
            raise OSError(f"{self._blob.name}: seek to {position}, before the start")
        self._position = position
        return position

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` bytes, fewer only at the end of the object.

        Raises `ShardError` for more than 32 MiB at once, which only a header that lies asks for.
        """
        left = max(self._blob.size - self._position, 0)
        size = left if size is None or size < 0 else min(size, left)
        if size > LARGEST_READ_BYTES:
            problem = f"its header asks for {size:,} bytes at once, which no token file needs"
            raise unusable(self._blob.name, problem)
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
        self._fetch()
        start, content = self._ranges[-1]
        return content[self._position - start :][:size]

    def _fetch(self) -> None:
        start, length = self._position, FIRST_RANGE_BYTES
        for known in self._ranges:
            if known[0] + len(known[1]) == start:  # read on: ask for more each time
                length = max(min(2 * len(known[1]), LARGEST_RANGE_BYTES), length)
                self._ranges.remove(known)
                break
        else:  # the end is read backwards: footer, then directory
            start = min(start, max(self._blob.size - FIRST_RANGE_BYTES, 0))
        length = min(length, self._blob.size - start)
        content = self._bucket.read(self._blob.name, start=start, length=length)
        if len(content) != length:
            raise ShardError(
                f"{self._blob.name}: {len(content):,} bytes came where the listing promised "
                f"{length:,}; the object changed or is truncated. Start again to list it anew, "
                "or put its name in data.exclude."
            )
        self._ranges = [*self._ranges[-(RANGES_KEPT - 1) :], (start, content)]


@contextlib.contextmanager
def opened_zip(file: ByteSource, *, name: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip file; whatever a broken one raises inside the block becomes a `ShardError`."""
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
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
        raise unusable(name, f"the zip file is truncated or corrupt ({error})") from None


def checked_member(archive: zipfile.ZipFile, member: str, *, name: str) -> zipfile.ZipInfo:
    """Return a member's entry; raise `ShardError` if it claims more than its bytes can hold."""
    info = archive.getinfo(member)
    if info.file_size > info.compress_size * LARGEST_RATIO:
        raise unusable(
            name,
            f"its member {member} claims {info.file_size:,} bytes out of {info.compress_size:,} "
            "compressed ones, which cannot be",
        )
    return info


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
        compressed = self._stream.unconsumed_tail
        if not compressed:
            self._file.seek(self._position)  # another member may be read in turns
            compressed = self._file.read(min(COMPRESSED_BYTES, self._end - self._position))
            self._position += len(compressed)
        piece = self._stream.decompress(compressed, INFLATED_BYTES)
        if not piece and not compressed:
            raise EOFError(f"the data of {self._info.filename!r} end early")
        self._crc = isal_zlib.crc32(piece, self._crc)
        return piece
