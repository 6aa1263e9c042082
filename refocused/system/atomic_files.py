"""Small files replaced at once, old content or new; and how bytes are pushed to the disk."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

_SYNC_FILE_RANGE_WRITE = 2  # from linux/fs.h: begin to write, and do not wait


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


def begin_write_back(descriptor: int, start: int, size: int) -> None:
    """Let the kernel write a part of a file to the disk, where it can be asked to; do not wait.

    Only a hint: what it cannot do, and what fails in it, is left to `fsync`.
    """
    if (sync := _sync_file_range()) is not None:
        sync(descriptor, start, size, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[..., int] | None:
    """Return Linux's `sync_file_range`, which Python does not offer; None: there is none."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast("Callable[..., int] | None", function)
