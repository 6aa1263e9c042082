"""File locks: one holder among the processes of a machine or of a shared disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from refocused.system.errors import ShardError


class FileLock:
    """A lock that ends with its owner: the kernel drops it even after kill -9.

    Not before: forgetting the object does not give the lock up.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Take the lock if it is free; return whether it is ours now.

        Raises:
            OSError: The file cannot be made.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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


@contextlib.contextmanager
def exclusive_folder(folder: Path) -> Iterator[None]:
    """Make a folder and hold its lock.

    Raises:
        ShardError: Another process holds it, or the folder cannot be made.
    """
    file = folder / "lock"
    lock = FileLock(file)
    try:
        is_ours = lock.acquire()
    except OSError as error:
        raise ShardError(f"{folder}: cannot be written ({error.strerror}).") from error
    if not is_ours:
        raise ShardError(
            f"{folder}: another process is at work there. Let it end, or stop it, and run "
            "this again."
        )
    try:
        yield
    finally:
        if list(folder.glob("*")) == [file]:  # leave nothing where nothing was begun
            file.unlink()
            folder.rmdir()
        lock.release()
