"""Read objects of a bucket, and zip members in them, as files, by range requests."""

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
MAX_RANGE_BYTES = 8 * 1024 * 1024
MAX_READ_BYTES = 32 * 1024 * 1024
CACHED_RANGES = 4  # a mask and its ids are read side by side

# Deflate's maximum is 1032 to 1 (zlib's technical notes); stored members are 1 to 1.
MAX_RATIO = 1040
LOCAL_HEADER_BYTES = 30  # before the member's name and extra field (APPNOTE.TXT, 4.3.7)
COMPRESSED_BYTES = 1 << 17  # per read: few thread switches, and still within a core's cache
# Output limit of one call, reached only by extremely compressible members. A lower limit leaves a
# remainder of a different size in each call, which fragments the heap (4 to 10 MiB over 32 shards).
INFLATED_BYTES = 1 << 20

ByteSource = io.BufferedIOBase  # an open local file, or an `ObjectReader`


class ObjectReader(io.BufferedIOBase):
    """Reads an object by ranges: 64 KiB after a seek, growing to 8 MiB for sequential reads."""

    def __init__(self, bucket: Bucket, blob: BlobInfo) -> None:
        self._bucket = bucket
        self._blob = blob
        self._position = 0
        self._ranges: list[tuple[int, bytes]] = []

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes from the start."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move the position as `io.IOBase.seek` does."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._blob.size}
        position = base[whence] + offset
        if position < 0:  # zipfile expects OSError for a file shorter than its footer
            raise OSError(f"{self._blob.name}: seek to {position}, before the start")
        self._position = position
        return position

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` bytes, fewer only at the end of the object.

        Raises `ShardError` for over 32 MiB at once, which only a damaged header requests.
        """
        left = max(self._blob.size - self._position, 0)
        size = left if size is None or size < 0 else min(size, left)
        if size > MAX_READ_BYTES:
            problem = f"its header requires a read of {size:,} bytes, more than any token file"
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
            if known[0] + len(known[1]) == start:  # sequential: double the range
                length = max(min(2 * len(known[1]), MAX_RANGE_BYTES), length)
                self._ranges.remove(known)
                break
        else:  # a zip's end is read backwards: footer, then directory
            start = min(start, max(self._blob.size - FIRST_RANGE_BYTES, 0))
        length = min(length, self._blob.size - start)
        content = self._bucket.read(self._blob.name, start=start, length=length)
        if len(content) != length:
            raise ShardError(
                f"{self._blob.name}: {len(content):,} bytes arrived instead of the listed "
                f"{length:,}; the object changed or is truncated. Run again to list it anew, "
                "or put its name in data.exclude."
            )
        self._ranges = [*self._ranges[-(CACHED_RANGES - 1) :], (start, content)]


@contextlib.contextmanager
def open_zip(file: ByteSource, *, name: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip file, and turn errors of a damaged one inside the block into `ShardError`."""
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except (  # type: ignore[misc]  # isal's stub names its exception as if it were an instance
        zipfile.BadZipFile,
        zlib.error,
        isal_zlib.error,
        struct.error,
        EOFError,
        NotImplementedError,  # an unknown compression method
        RuntimeError,  # an encrypted member
        OverflowError,
        OSError,  # a seek before the start, by wrong offsets
        ValueError,  # the same in a file in memory; a member's name that is not text
    ) as error:
        raise unusable(name, f"the zip file is truncated or corrupt ({error})") from None


def checked_member(archive: zipfile.ZipFile, member: str, *, name: str) -> zipfile.ZipInfo:
    """Return a member's entry; raise `ShardError` if its compression ratio is impossible."""
    info = archive.getinfo(member)
    if info.file_size > info.compress_size * MAX_RATIO:
        raise unusable(
            name,
            f"its member {member} claims {info.file_size:,} bytes from {info.compress_size:,} "
            "compressed ones, which is impossible",
        )
    return info


def member_reader(
    file: ByteSource, archive: zipfile.ZipFile, member: str, *, offset: int
) -> Callable[[int], bytes]:
    """Return a function that reads a member from an offset on, as `zipfile`'s `read`.

    It verifies the member's CRC-32 at the end.
    """
    content = archive.open(member)  # rejects encrypted members and wrong local headers
    if archive.getinfo(member).compress_type != zipfile.ZIP_DEFLATED:
        content.seek(offset)
        return content.read
    content.close()
    inflated = _Inflated(file, archive.getinfo(member))
    inflated.read(offset)
    return inflated.read


class _Inflated:
    """A deflated member, read by ISA-L: zlib's inflate would dominate the first pass."""

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
        """Return `size` bytes, fewer only at the member's end."""
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
            self._file.seek(self._position)  # another member may be read in between
            compressed = self._file.read(min(COMPRESSED_BYTES, self._end - self._position))
            self._position += len(compressed)
        piece = self._stream.decompress(compressed, INFLATED_BYTES)
        if not piece and not compressed:
            raise EOFError(f"the data of {self._info.filename!r} are truncated")
        self._crc = isal_zlib.crc32(piece, self._crc)
        return piece
