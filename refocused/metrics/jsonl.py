"""Write, follow and read JSON files that survive a crash."""

import contextlib
import dataclasses
import datetime
import errno
import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from refocused.system.atomic_files import read_regular, replace_file
from refocused.system.strict_json import MalformedError, parse_json_object

logger = logging.getLogger(__name__)

Record = dict[str, Any]


class JsonLines:
    """A file of one JSON object a line.

    A line goes out in one write with O_APPEND, so that readers and other writers see whole lines.
    A full disk loses lines, not the run: one warning, and the file goes on when there is room.
    """

    def __init__(self, path: Path, *, compact: bool = False) -> None:
        """Open a file, which may be new, and end a line that a crash had torn.

        `compact` leaves out the spaces, for a file that grows fast.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._separators = (",", ":") if compact else None
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._file).st_size
        self._torn = bool(size) and os.pread(self._file, 1, size - 1) != b"\n"
        self._failing = False

    def write(self, record: Mapping[str, object]) -> bool:
        """Append a record and its UTC `time`, NaN and infinity as null; return whether it fit."""
        known = {"time": utc_now(), **finite(record)}
        line = json.dumps(known, default=str, separators=self._separators).encode() + b"\n"
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


class JsonLinesTail:
    """Follows one file of one JSON object a line.

    Torn lines and bytes that are no text are skipped. A last line without its end is read when it
    is whole. A file that was replaced or cut is read from its begin.
    """

    def __init__(self, path: Path, *, last_bytes: int = sys.maxsize) -> None:
        """Read nothing yet; later only the `last_bytes` of a file that is already longer."""
        self._path = path
        self._last_bytes = last_bytes
        self._file_id: tuple[int, int] | None = None
        self._offset = 0
        self.malformed = 0  # lines that were skipped

    def records(self) -> list[Record]:
        """Return the records that were written since the last call."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                file_id, size, begins_inside = (status.st_dev, status.st_ino), status.st_size, False
                if file_id != self._file_id or size < self._offset:
                    self._file_id, self._offset = file_id, max(0, size - self._last_bytes)
                    begins_inside = self._offset > 0
                file.seek(self._offset)
                content = file.read(size - self._offset)
        except OSError:
            return []  # it does not exist yet, or its disk is away for now
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = [line for line in whole.split(b"\n")[begins_inside:] if line.strip()]
        records = [record for line in lines if (record := as_record(line)) is not None]
        self.malformed += len(lines) - len(records)
        return records


def as_record(line: bytes) -> Record | None:
    """Return a line's object; None: it is none."""
    try:
        return parse_json_object(line.decode(errors="replace"))
    except MalformedError:
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class SmallFile:
    """A file of one JSON object, which may not exist."""

    content: Record | None = None
    trouble: str | None = None  # why it cannot be read


def read_small(path: Path) -> SmallFile:
    """Read a file of one JSON object."""
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return SmallFile()
    except OSError as error:
        return SmallFile(trouble=error.strerror or str(error))
    if not content.strip(b" \t\r\n\0"):  # zeros are what a crash of the machine leaves
        return SmallFile(trouble="it is empty")
    record = as_record(content)
    return SmallFile(record, None if record is not None else "it is torn, or no JSON object")


def read_json(path: Path) -> Record | None:
    """Return the object in a small file; None: it does not exist or holds none."""
    return read_small(path).content


def number(record: Mapping[str, Any], name: str) -> float | None:
    """Return a field that is a finite number; None where it is anything else."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def whole_number(record: Mapping[str, Any], name: str) -> int | None:
    """Return a field that is a whole number; None where it is anything else."""
    value = record.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text(record: Mapping[str, Any], name: str) -> str | None:
    """Return a field that is text; None where it is anything else."""
    value = record.get(name)
    return value if isinstance(value, str) else None


def write_state(path: Path, state: Mapping[str, object]) -> None:
    """Replace a small JSON file so that a reader sees the old or the new one, never a part.

    On a full disk it is overwritten in place, in one write.
    """
    known = {"updated": utc_now(), **finite(state)}
    content = (json.dumps(known, indent=1, default=str) + "\n").encode()
    try:
        replace_file(path, content, concurrent=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # Write into the blocks that the file has already. A run that fails on a full disk must
            # still say so: its last state alone would look as if it had been killed.
            with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
                status = os.fstat(file.fileno())
                padded = content.ljust(status.st_size)  # spaces: JSON may end with them
                if len(content) <= status.st_blocks * 512 and file.write(padded) == len(padded):
                    return
        # The old one still stands, with its time.
        logger.warning("%s was not renewed: %s.", path, error.strerror)


def utc_now() -> str:
    """Return the time of day in UTC, to the millisecond, as ISO 8601."""
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def finite(value: Any) -> Any:
    """Replace the numbers that JSON does not know by None, in mappings of any depth."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings by dotted name: `{"run": {"name": 1}}` becomes `{"run.name": 1}`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{below}": inner for below, inner in dotted(value).items()}
        else:
            flat[str(name)] = value
    return flat
