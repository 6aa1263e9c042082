"""Members of `.npz` and `.pt` files: a zip whose directory and sizes are not trusted."""

from __future__ import annotations

import contextlib
import struct
import zipfile
import zlib
from collections.abc import Iterator

from refocused.errors import ShardError
from refocused.shards.object_reader import ByteSource

# Deflate cannot do better than 1032 to 1 (zlib's technical notes); stored members are 1 to 1.
LARGEST_RATIO = 1040


@contextlib.contextmanager
def zip_faults_named(name: str) -> Iterator[None]:
    """Turn whatever a broken zip raises while it is read into a `ShardError` with its name."""
    try:
        yield
    except (
        zipfile.BadZipFile,
        zlib.error,
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
