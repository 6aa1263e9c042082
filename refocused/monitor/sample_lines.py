"""Read a file of GPU and machine readings, also one of version 0.1, which wrote short lines.

A line that has `host` is whole. A short one says of which GPU it is (`index`; the machine has none)
and holds the fields that have changed since the line before of the same GPU.
"""

from __future__ import annotations

from pathlib import Path

from refocused.metrics.jsonl import JsonLinesTail, Record

_Key = tuple[object, object]


class SamplesTail:
    """Follows one file of samples and completes its lines."""

    def __init__(self, path: Path, *, last_bytes: int | None = None) -> None:
        """Read nothing yet; see `JsonLinesTail`."""
        self._tail = JsonLinesTail(path, last_bytes=last_bytes)
        self._latest: dict[_Key, Record] = {}

    def records(self) -> list[Record]:
        """Return the new lines, whole; those before a GPU's first whole one are left out."""
        return [
            whole for line in self._tail.records() if (whole := self._completed(line)) is not None
        ]

    def _completed(self, line: Record) -> Record | None:
        key = _key(line)
        if "host" not in line and key not in self._latest:
            return None
        self._latest[key] = line if "host" in line else {**self._latest[key], **line}
        return self._latest[key]


def _key(record: Record) -> _Key:
    return str(record.get("kind")), str(record.get("index"))
