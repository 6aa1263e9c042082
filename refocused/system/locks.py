"""A lock on a file: of the processes of one machine, or one shared disk, one has it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """A lock that ends with its owner: the kernel drops it even after kill -9.

    Not before: forgetting the object does not give the lock up.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Take the lock when nobody else has it; return whether it is ours now.

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
