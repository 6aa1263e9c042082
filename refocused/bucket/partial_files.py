"""Receive files under a temporary name, and rename them once they are complete."""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from refocused.bucket.bucket import crc32c_of, extended_crc32c
from refocused.system.atomic_files import publish, start_write_back
from refocused.system.errors import BucketError

PART_SUFFIX = ".part"
# Bytes are written back as they arrive; otherwise the final `fsync` waits for all of them (60 of
# 720 ms per file, measured with eight concurrent downloads of 12.5 MB).
WRITE_BACK_BYTES = 4 * 1024 * 1024
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def part_path(target: Path) -> Path:
    """Return the temporary path, beside `target`, under which it is received.

    It is the same for each attempt, so that a later one can resume. No object may have such a name
    (`TEMPORARY_NAME`), unlike `a.npy.part`.
    """
    digest = hashlib.sha256(os.fsencode(target.name)).hexdigest()
    return target.with_name(f".{digest[:32]}{PART_SUFFIX}")


def existing_folder(folder: Path) -> Path:
    """Return a folder, or its nearest existing parent."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return existing


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(existing_folder(folder)).free


def _no_space(folder: Path, needed_bytes: int) -> BucketError:
    return BucketError(
        f"No space left in {folder}: {needed_bytes:,} bytes needed, "
        f"{free_bytes(folder):,} free. Free some space, or choose a folder on another disk."
    )


def require_space(folder: Path, *, needed_bytes: int) -> None:
    """Raise `BucketError` if fewer than `needed_bytes` are free on a folder's disk."""
    if needed_bytes > free_bytes(folder):
        raise _no_space(folder, needed_bytes)


@contextlib.contextmanager
def disk_errors(path: Path, *, needed_bytes: int = 0) -> Iterator[None]:
    """Turn a failure of the local disk into a `BucketError` that names the file.

    `needed_bytes` are still to be written; the message of a full disk gives them.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _no_space(path.parent, needed_bytes) from error
        raise BucketError(
            f"{path}: {error.strerror or error}. Check that the folder exists, that this user may "
            "write to it, and that its disk is neither read-only nor failing."
        ) from error


class PartFile:
    """A file being received as `part_path(target)`; creates its folder.

    With `resume`, an earlier process's file is continued unless it is longer than `total_bytes`.
    `size` and `crc32c` are those of all bytes received so far. Disk errors become `BucketError`.
    """

    def __init__(self, target: Path, *, total_bytes: int, resume: bool) -> None:
        self.target = target
        self.path = part_path(target)
        self.size = self.crc32c = self._sent_to_disk = 0
        self._total_bytes = total_bytes
        with disk_errors(self.path, needed_bytes=total_bytes):
            target.parent.mkdir(parents=True, exist_ok=True)
            kept = self.path.stat().st_size if resume and self.path.exists() else 0
            if 0 < kept <= total_bytes:
                self.size, self.crc32c = kept, crc32c_of(self.path)
            # Unbuffered, so that a full disk fails the write itself.
            self._file = self.path.open("ab" if self.size else "wb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> None:
        """Append bytes."""
        with disk_errors(self.path, needed_bytes=self._total_bytes - self.size):
            view = memoryview(content)
            while view:
                view = view[self._file.write(view) :]
        self.crc32c = extended_crc32c(self.crc32c, content)
        self.size += len(content)
        unsent = self.size - self._sent_to_disk
        if unsent >= WRITE_BACK_BYTES:
            start_write_back(self._file.fileno(), self._sent_to_disk, unsent)
            self._sent_to_disk = self.size

    def restart(self) -> None:
        """Discard the received bytes and start over."""
        with disk_errors(self.path):
            self._file.close()
            self._file = self.path.open("wb", buffering=0)
        self.size = self.crc32c = self._sent_to_disk = 0

    def publish(self) -> None:
        """Rename the file to its target, durably."""
        with disk_errors(self.path, needed_bytes=self._total_bytes):
            publish(self._file, self.target)
            self._file.close()

    def discard(self) -> None:
        """Remove the temporary file."""
        self._file.close()
        self.path.unlink(missing_ok=True)
