"""A work folder that one process at a time uses; a dead holder's lock vanishes by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from refocused.system.errors import ShardError
from refocused.system.locks import FileLock

LOCK_NAME = "lock"


@contextlib.contextmanager
def exclusive_folder(folder: Path) -> Iterator[None]:
    """Make a folder and hold its lock.

    Raises:
        ShardError: Another process holds it.
        ShardError: The folder cannot be made.
    """
    try:
        lock = FileLock(folder / LOCK_NAME)
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
        _remove_if_unused(folder)
        lock.release()


def _remove_if_unused(folder: Path) -> None:
    """Leave nothing where nothing was begun."""
    if [path.name for path in folder.glob("*")] == [LOCK_NAME]:
        (folder / LOCK_NAME).unlink()
        folder.rmdir()
