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


def replace_folder(fresh: Path, folder: Path) -> None:
    """Give a finished folder its name; one that has it goes first, and is removed after that.

    Args:
        fresh: The new folder, beside the other.
        folder: The name.
    """
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
