"""The run's own files: JSON lines that survive a crash, and a state file that is always whole."""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path


class JsonLines:
    """A file of one JSON object a line.

    A line goes out in one write with O_APPEND, so that readers and other writers see whole lines;
    after a rewind the later line of a step wins.
    """

    def __init__(self, path: Path) -> None:
        """Open a file for appending, ending a line that a crash had torn."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def write(self, record: Mapping[str, object]) -> None:
        """Append a record with the time of day, `time`, in UTC."""
        line = json.dumps({"time": utc_now(), **record}, default=str)
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def write_state(path: Path, state: Mapping[str, object]) -> None:
    """Replace a small JSON file so that a reader sees the old or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"updated": utc_now(), **state}, indent=1, default=str) + "\n")
    temporary.replace(path)


def utc_now() -> str:
    """Return the time of day in UTC, to the millisecond, as ISO 8601."""
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def finite(number: float | None) -> float | None:
    """Return a number that JSON can hold; None for one that it cannot."""
    return number if number is not None and math.isfinite(number) else None
