"""Read objects of a bucket as files, by range requests, and open zip files among them."""

import contextlib
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.data.formats.object_names import unusable
from refocused.system.errors import ShardError

FIRST_RANGE_BYTES = 64 * 1024  # holds the directory of a zip of a few members
MAX_RANGE_BYTES = 8 * 1024 * 1024
MAX_READ_BYTES = 32 * 1024 * 1024
CACHED_RANGES = 4  # a mask and its ids are read side by side

# Deflate's maximum is 1032 to 1 (zlib's technical notes); stored members are 1 to 1.
MAX_RATIO = 1040

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
            for start, content in self._ranges:
                if 0 <= self._position - start < len(content):
                    break
            else:
                start, content = self._fetch()
            pieces.append(content[self._position - start :][:size])
            self._position += len(pieces[-1])
            size -= len(pieces[-1])
        return b"".join(pieces)

    def _fetch(self) -> tuple[int, bytes]:
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
        return start, content


@contextlib.contextmanager
def open_zip(file: ByteSource, *, name: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip file, and turn errors of a damaged one inside the block into `ShardError`."""
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        NotImplementedError,  # an unknown compression method
        RuntimeError,  # an encrypted member
        OverflowError,
        OSError,  # a seek before the start, by wrong offsets
        ValueError,  # the same in a file in memory; a member's name that is not text
    ) as error:
        raise unusable(
            name, f"the zip file is truncated or corrupt ({error or 'it ends early'})"
        ) from None


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
