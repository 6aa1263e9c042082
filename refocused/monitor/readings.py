"""GPU and machine readings and alarms: their fields, and how their files are read.

Every few seconds each machine writes one line for each of its GPUs and one for itself, to
`logs/gpu_metrics.jsonl`, machine N of several to `gpu_metrics-node-N.jsonl`, since appending is not
safe for several machines in one file. Alarms go to `events.jsonl`, named alike.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from refocused.metrics.history import unix_time
from refocused.metrics.jsonl import Record, number
from refocused.metrics.jsonl import as_record as parse_line

Severity = Literal["warning", "critical"]

MOST_BYTES = 32 << 20  # parsed of one file, about a second's work: a part of a longer one
BLOCK_LINES = 64  # kept or skipped together


@dataclasses.dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one time; None: the GPU, its driver or its mode does not tell."""

    kind: ClassVar[str] = "gpu"

    host: str
    index: int  # NVML's number of the GPU, in the order of the PCI bus
    uuid: str | None = None
    name: str | None = None
    local_rank: int | None = None  # by CUDA_VISIBLE_DEVICES; None: no rank of this run has it
    lost: bool = False  # it has fallen off the bus; all measurements are None
    utilization_fraction: float | None = None  # share of the time in which any kernel ran
    memory_used_gib: float | None = None  # by any process
    memory_total_gib: float | None = None
    temperature_celsius: int | None = None
    slowdown_celsius: int | None = None  # from where on the chip slows itself down
    memory_temperature_celsius: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None  # `hw_slowdown`, `sw_thermal`, `hw_thermal`,
    # `hw_power_brake`; not the power limit, at which a GPU is busy and healthy
    clock_event_bits: int | None = None  # all of NVML's reasons for a lower clock
    ecc_corrected: int | None = None  # since the driver was loaded, as `ecc_uncorrected`
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None  # of memory, replaced by spare ones in the GPU's life
    remap_pending: bool | None = None  # until the GPU is reset
    remap_failed: bool | None = None  # no spare rows: the GPU must be exchanged
    nvlinks_active: int | None = None
    nvlinks_total: int | None = None
    nvlink_errors: int | None = None  # on all links, since the driver was loaded
    nvlink_sent_gib_per_second: float | None = None  # over all links, mean of half a minute
    nvlink_received_gib_per_second: float | None = None
    pcie_generation: int | None = None  # now; that of an idle GPU is lower
    pcie_generation_max: int | None = None
    pcie_width: int | None = None  # lanes now
    pcie_width_max: int | None = None
    pcie_replays: int | None = None  # repeated packets since the driver was loaded
    mig: bool | None = None  # cut into slices
    processes: dict[int, float | None] | None = None  # GiB by process id; None: unknown


@dataclasses.dataclass(frozen=True, slots=True)
class SystemSample:
    """One machine at one time; None: unknown. Rates are since the last reading."""

    kind: ClassVar[str] = "system"

    host: str
    gpus: int | None = None  # that NVML counts; None: there is no NVML
    gpu_note: str | None = None  # why there are no GPU readings
    cpu_fraction: float | None = None  # of all cores' time
    cpu_cores: int | None = None
    load_1m: float | None = None
    memory_used_gib: float | None = None  # not available to processes any more
    memory_total_gib: float | None = None  # of the machine, or of the container if that is less
    swap_used_gib: float | None = None
    disk_free_gib: float | None = None  # for us, on the disk of the run's folder
    disk_total_gib: float | None = None
    disk_read_mib_per_second: float | None = None  # all disks
    disk_written_mib_per_second: float | None = None
    network_received_mib_per_second: float | None = None  # all devices but the loopback
    network_sent_mib_per_second: float | None = None


class Rates:
    """Rates of counters since they were last read."""

    def __init__(self) -> None:
        self._before: tuple[float, Sequence[float | None]] | None = None

    def since_last(self, now: float, counts: Sequence[float | None]) -> list[float | None]:
        """Return each counter's rate a second; None if it is new, unknown or began anew."""
        began, before = self._before or (now, counts)
        self._before = now, counts
        return [
            round((after - count) / (now - began), 3)
            if count is not None and after is not None and after >= count and now > began
            else None
            for count, after in zip(before, counts, strict=True)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class AlarmEvent:
    """An alarm that begins or ends; `alarm` and `subject` name it."""

    kind: ClassVar[str] = "alarm"

    alarm: str  # the rule: `gpu_temperature`
    subject: str  # what it is about: `node1 GPU 5`, `run`
    raised: bool  # whether it begins
    severity: Severity  # `critical`: somebody should act now
    text: str  # for a person
    host: str  # the machine that noticed it


def as_record(sample: GpuSample | SystemSample | AlarmEvent) -> dict[str, Any]:
    """Return a sample's line: its kind, and its fields under their own names."""
    names = sample.__slots__  # dataclasses.asdict copies deeply, at ten times the cost
    return {"kind": sample.kind, **{name: getattr(sample, name) for name in names}}


@dataclasses.dataclass(frozen=True, slots=True)
class GpuMinute:
    """All GPUs of a run in one minute, of its machines where their ranks are not known."""

    time: float  # its beginning, in Unix seconds
    utilization_fraction: float | None  # mean over the GPUs
    hottest_celsius: float | None  # of any GPU
    power_watts: float | None  # mean of a GPU
    memory_gib: float | None  # the most that any GPU had in use


def read_gpu_minutes(logs: Path) -> list[GpuMinute]:
    """Read the readings of all machines in a run's folder of logs."""
    files = sorted(logs.glob("gpu_metrics*.jsonl"))
    return gpu_minutes(record for file in files for record in _some_records(file))


def gpu_minutes(records: Iterable[Record]) -> list[GpuMinute]:
    """Gather GPU readings by the minute, ascending."""
    by_minute: dict[float, list[Record]] = collections.defaultdict(list)
    for record in records:
        at = unix_time(record.get("time"))
        if record.get("kind") == GpuSample.kind and at is not None:
            by_minute[at // 60 * 60].append(record)
    minutes = []
    for minute, samples in sorted(by_minute.items()):
        of_run = [one for one in samples if one.get("local_rank") is not None] or samples
        busy, celsius, watts, gib = (
            [value for one in of_run if (value := number(one, name)) is not None]
            for name in (
                "utilization_fraction",
                "temperature_celsius",
                "power_watts",
                "memory_used_gib",
            )
        )
        minutes.append(
            GpuMinute(
                minute,
                statistics.fmean(busy) if busy else None,
                max(celsius, default=None),
                statistics.fmean(watts) if watts else None,
                max(gib, default=None),
            )
        )
    return minutes


def _some_records(file: Path) -> Iterator[Record]:
    """Yield the records of a file, or of evenly spread blocks of a long one."""
    try:
        share = file.stat().st_size // MOST_BYTES + 1
        with file.open("rb") as lines:
            for place, line in enumerate(lines):
                if place // BLOCK_LINES % share == 0 and (record := parse_line(line)) is not None:
                    yield record
    except OSError:  # its disk went away: show what was read
        return
