"""Samples as lines: most hold only what is not as in the line before of the same GPU.

A line that has `host` is whole. One that has not says only of which GPU it is (`index`; the
machine has none), what every line says (`EVERY_LINE`), and the fields that have changed since the
line before in the same file. Eight GPUs would otherwise fill 136 MB a day.
"""

from __future__ import annotations

from pathlib import Path

from refocused.metrics.tail import JsonLinesTail, Record
from refocused.monitor.readings import GpuSample, SystemSample, as_record

WHOLE_EVERY = 60  # lines of one GPU: five minutes of the usual interval
# What a summary of a long run takes from a part of the lines.
EVERY_LINE = frozenset(
    {
        "kind",
        "index",
        "local_rank",
        "utilization_fraction",
        "memory_used_gib",
        "temperature_celsius",
        "power_watts",
    }
)

_Key = tuple[object, object]


class SampleShortener:
    """Leaves out of samples what their readers know from earlier lines of the same file."""

    def __init__(self) -> None:
        self._before: dict[_Key, Record] = {}
        self._lines: dict[_Key, int] = {}

    def record(self, sample: GpuSample | SystemSample) -> Record:
        """Return the next line of a sample's GPU or machine."""
        record = as_record(sample)
        key = _key(record)
        before, lines = self._before.get(key), self._lines.get(key, 0)
        self._before[key] = record
        if before is None or lines >= WHOLE_EVERY:
            self._lines[key] = 1
            return record
        self._lines[key] = lines + 1
        return {
            name: value
            for name, value in record.items()
            if name in EVERY_LINE or value != before[name]
        }

    def forget(self) -> None:
        """Begin anew: a line may not have been written."""
        self._before.clear()


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
