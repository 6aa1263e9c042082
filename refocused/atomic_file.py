"""Small files replaced at once: a reader sees all of the old content or all of the new."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def replace_file(
    path: Path, content: bytes, *, durable: bool = False, rivals: bool = False
) -> None:
    """Give a file new content; when this raises, the old one still stands.

    The temporary file is hidden and lies beside it. Its name is fixed, so that what a killed
    writer left is taken over by the next one.

    Args:
        path: The file; its folder exists.
        content: All of it.
        durable: On return it survives a power cut, by its new content.
        rivals: Other processes may replace it at the same time: the last one wins, whole. The
            temporary name is then this process's own.

    Raises:
        OSError: The disk is full or cannot be written.
    """
    own = f".{os.getpid()}" if rivals else ""
    temporary = path.with_name(f".{path.name}{own}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        synchronize(path.parent)


def synchronize(path: Path) -> None:
    """Push a file's bytes, or a folder's names, to the disk.

    A new name survives a power cut only after this was done to its folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
