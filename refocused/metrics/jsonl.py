"""The run's own files: JSON lines that survive a crash, and a state file that is always whole."""

from __future__ import annotations

import datetime
import errno
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

from refocused.system.atomic_files import replace_file

logger = logging.getLogger(__name__)


class JsonLines:
    """A file of one JSON object a line.

    A line goes out in one write with O_APPEND, so that readers and other writers see whole lines;
    after a rewind the later line of a step wins. A disk that is full loses lines, not the run: one
    warning, and the file goes on when there is room.
    """

    def __init__(self, path: Path, *, compact: bool = False) -> None:
        """Open a file for appending, ending a line that a crash had torn.

        Args:
            path: The file; its folder is made.
            compact: Write no spaces: for what grows fast.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._compact = compact
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._file).st_size
        self._torn = bool(size) and os.pread(self._file, 1, size - 1) != b"\n"
        self._failing = False

    def write(self, record: Mapping[str, object]) -> bool:
        """Append a record with the time of day, `time`, in UTC; NaN and infinity become null.

        Returns:
            Whether there was room for all of it.
        """
        known = {"time": utc_now(), **_known(record)}
        separators = (",", ":") if self._compact else None
        line = json.dumps(known, default=str, separators=separators).encode() + b"\n"
        content = b"\n" + line if self._torn else line
        reason = "there is no room for a whole line"
        try:
            written = os.write(self._file, content)
        except OSError as error:
            written, reason = 0, error.strerror or str(error)
        if written == len(content):
            self._torn = self._failing = False
            return True
        self._torn = self._torn or written > 0
        if not self._failing:
            logger.warning("%s: %s. Lines are lost until it can be written.", self._path, reason)
        self._failing = True
        return False

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def write_state(path: Path, state: Mapping[str, object]) -> None:
    """Replace a small JSON file so that a reader sees the old or the new one, never a part.

    Where the disk is full, it is overwritten in one write.
    """
    text = json.dumps({"updated": utc_now(), **_known(state)}, indent=1, default=str) + "\n"
    content = text.encode()
    try:
        replace_file(path, content, rivals=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and _fits_in_place(path, content):
            return
        # The old one still stands, with its time.
        logger.warning("%s was not renewed: %s.", path, error.strerror)


def _fits_in_place(path: Path, content: bytes) -> bool:
    """Overwrite a file inside the blocks that it has; return whether that was possible.

    A full disk has no room for a second file, and a run that fails there has to say so: without
    its last state it looks as if it had been killed.
    """
    try:
        with path.open("r+b", buffering=0) as file:
            known = os.fstat(file.fileno())
            if len(content) > known.st_blocks * 512:
                return False
            padded = content.ljust(known.st_size)  # spaces: JSON may end with them
            return file.write(padded) == len(padded)
    except OSError:
        return False


def utc_now() -> str:
    """Return the time of day in UTC, to the millisecond, as ISO 8601."""
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _known(record: Mapping[str, object]) -> dict[str, object]:
    """Return a record with None for the numbers that JSON does not know, at any depth."""
    return {name: _known_value(value) for name, value in record.items()}


def _known_value(value: object) -> object:
    if isinstance(value, Mapping):
        return _known(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
