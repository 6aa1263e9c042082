"""Writes that a crash cannot leave half done, and the lock that keeps two writers apart."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

from refocused.atomic_file import replace_file, synchronize


def fsync_path(path: Path) -> None:
    """Push a file's bytes, or a directory's names, to the disk."""
    synchronize(path)


def fsync_directories(root: Path) -> None:
    """Push the names below `root`, and those in it, to the disk; innermost first."""
    below = [path for path in root.rglob("*") if path.is_dir()]
    for directory in sorted(below, key=lambda path: len(path.parts), reverse=True):
        fsync_path(directory)
    fsync_path(root)


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Replace a file by new content: a reader sees all of the old or all of the new.

    The hidden temporary name is fixed, so that a writer killed here leaves one file that the next
    write takes over; a path has therefore one writer at a time.
    """
    replace_file(path, content, durable=True)


def write_json_atomic(path: Path, content: object) -> None:
    """Replace a file by `content` as indented JSON, as `write_bytes_atomic` does.

    Raises:
        ValueError: `content` holds NaN or an infinity, which JSON has no form for.
    """
    text = json.dumps(content, indent=1, allow_nan=False)
    write_bytes_atomic(path, (text + "\n").encode())


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file that never changes another name, or copy it where that cannot be done."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
        fsync_path(target)


class FileLock:
    """A lock that ends with its owner: the kernel drops it even after kill -9."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Take the lock when nobody else has it; return whether it is ours now."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Give the lock up; the file stays, because removing it would let two owners in."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
