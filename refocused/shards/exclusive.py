"""A work folder that one process at a time uses; a dead holder's lock vanishes by itself."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from refocused.bucket.part_file import disk_errors
from refocused.errors import ShardError

LOCK_NAME = "lock"


@contextlib.contextmanager
def exclusive_folder(folder: Path) -> Iterator[None]:
    """Make a folder and hold its lock.

    Raises:
        ShardError: Another process holds it.
        BucketError: The folder cannot be made.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_NAME).open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ShardError(
                f"{folder}: another process is at work there. Let it end, or stop it, and run "
                "this again."
            ) from None
        try:
            yield
        finally:
            _remove_if_unused(folder)


def _remove_if_unused(folder: Path) -> None:
    """Leave nothing where nothing was begun."""
    if [path.name for path in folder.glob("*")] == [LOCK_NAME]:
        (folder / LOCK_NAME).unlink()
        folder.rmdir()
