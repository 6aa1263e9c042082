"""Small files replaced at once, old content or new; and how bytes are pushed to the disk."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

_SYNC_FILE_RANGE_WRITE = 2  # from linux/fs.h: begin to write, and do not wait


def replace_file(
    path: Path, content: bytes, *, durable: bool = False, rivals: bool = False
) -> None:
    """Give a file new content; when this raises, the old one still stands.

    A reader sees all of the old or all of the new. The temporary file is hidden and lies beside
    it. Its name is fixed, so that the next writer takes over what a killed one left.

    Args:
        path: The file; its folder exists.
        content: All of it.
        durable: On return the new content survives a power cut.
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
        fsync_path(path.parent)


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Replace a file durably; a path has one writer at a time."""
    replace_file(path, content, durable=True)


def write_json_atomic(path: Path, content: object) -> None:
    """Replace a file by `content` as indented JSON, durably; a path has one writer at a time.

    Raises:
        ValueError: `content` holds NaN or an infinity, which JSON has no form for.
    """
    text = json.dumps(content, indent=1, allow_nan=False)
    replace_file(path, (text + "\n").encode(), durable=True)


def fsync_path(path: Path) -> None:
    """Push a file's bytes, or a folder's names, to the disk.

    A new name survives a power cut only after this was done to its folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directories(root: Path) -> None:
    """Push the names below `root`, and those in it, to the disk; innermost first."""
    for folder, _, _ in os.walk(root, topdown=False):
        fsync_path(Path(folder))


def begin_write_back(descriptor: int, start: int, size: int) -> None:
    """Let the kernel begin to write a part of a file to the disk, and do not wait.

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


def replace_folder(fresh: Path, folder: Path) -> None:
    """Give a finished folder its name, beside it; one that has it is removed after that."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)  # of a replacement that was killed
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    fsync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file that never changes another name, or copy it where that cannot be done."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
        fsync_path(target)
