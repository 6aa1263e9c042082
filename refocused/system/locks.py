"""File locks between processes of one machine or of a shared disk."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from refocused.system.errors import ShardError


class FileLock:
    """A lock that the kernel releases when its process ends, even by kill -9.

    Deleting the object does not release it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Take the lock if it is free, and return whether it was."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        # Its last holder may have removed the file after it was opened here. Then this lock is no
        # lock, since the next process makes another file.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), self._path.stat()):
                self._descriptor = descriptor
                return True
        os.close(descriptor)
        return self.acquire()

    def release(self) -> None:
        """Release the lock. The file stays; only the lock's holder may remove it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


@contextlib.contextmanager
def exclusive_folder(folder: Path) -> Iterator[None]:
    """Create a folder and hold its lock; raise `ShardError` if that is not possible."""
    file = folder / "lock"
    lock = FileLock(file)
    try:
        acquired = lock.acquire()
    except OSError as error:
        raise ShardError(f"{folder}: cannot be written ({error.strerror}).") from error
    if not acquired:
        raise ShardError(
            f"{folder}: another process is working in this folder. Wait for it to finish, or stop "
            "it, and run the same command again."
        )
    try:
        yield
    finally:
        if list(folder.glob("*")) == [file]:  # nothing else is there: remove the folder
            file.unlink()
            with contextlib.suppress(OSError):  # another process has just created its lock
                folder.rmdir()
        lock.release()
