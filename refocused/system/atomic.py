"""Writes that a crash cannot leave half done."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from refocused.system.atomic_files import replace_file, synchronize


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
