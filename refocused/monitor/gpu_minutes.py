"""What the GPUs did over the whole of a run, minute by minute, from the sampler's files."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from refocused.metrics.history import unix_time
from refocused.metrics.jsonl import Record, as_record, number
from refocused.monitor.readings import GpuSample

MOST_BYTES = 32 << 20  # that are parsed of a file, about a second's work: of a longer one a part
BLOCK_LINES = 64  # that are taken or left together


@dataclasses.dataclass(frozen=True, slots=True)
class GpuMinute:
    """All GPUs of a run in one minute; None: no sample says.

    Where it is not known which ones the ranks have, all GPUs of its machines.

    Attributes:
        time: Its beginning, in Unix seconds.
        utilization_fraction: Mean over the GPUs.
        hottest_celsius: Of any GPU.
        power_watts: Mean of a GPU.
        memory_gib: The most that any GPU had in use.
    """

    time: float
    utilization_fraction: float | None
    hottest_celsius: float | None
    power_watts: float | None
    memory_gib: float | None


def read_gpu_minutes(logs: Path) -> list[GpuMinute]:
    """Read the samples of all machines in a run's folder of logs; empty where there are none."""
    files = sorted(logs.glob("gpu_metrics*.jsonl"))
    return gpu_minutes(record for file in files for record in _some_records(file))


def gpu_minutes(records: Iterable[Record]) -> list[GpuMinute]:
    """Gather samples by the minute, ascending; whole or not: it needs what each line has."""
    by_minute: dict[float, list[Record]] = collections.defaultdict(list)
    for record in records:
        at = unix_time(record.get("time"))
        if record.get("kind") == GpuSample.kind and at is not None:
            by_minute[at // 60 * 60].append(record)
    return [
        GpuMinute(
            minute,
            _mean(_values(samples, "utilization_fraction")),
            max(_values(samples, "temperature_celsius"), default=None),
            _mean(_values(samples, "power_watts")),
            max(_values(samples, "memory_used_gib"), default=None),
        )
        for minute, samples in (
            (minute, _of_the_run(all_samples)) for minute, all_samples in sorted(by_minute.items())
        )
    ]


def _some_records(file: Path) -> Iterator[Record]:
    """Return the records of a file, or of evenly spread blocks of it where it is long."""
    try:
        share = file.stat().st_size // MOST_BYTES + 1
        with file.open("rb") as lines:
            for place, line in enumerate(lines):
                if place // BLOCK_LINES % share == 0 and (record := as_record(line)) is not None:
                    yield record
    except OSError:  # its disk went away: what was read is shown
        return


def _of_the_run(samples: list[Record]) -> list[Record]:
    """Return the samples of the GPUs that ranks have; all, where that is not known of any."""
    return [one for one in samples if one.get("local_rank") is not None] or samples


def _values(samples: Iterable[Record], name: str) -> list[float]:
    return [value for sample in samples if (value := number(sample, name)) is not None]


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
