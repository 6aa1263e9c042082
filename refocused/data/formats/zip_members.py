"""Members of `.npz` and `.pt` files: a zip whose directory and sizes are not trusted."""

from __future__ import annotations

import contextlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator

from isal import isal_zlib

from refocused.data.formats.object_reader import ByteSource
from refocused.system.errors import ShardError

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
