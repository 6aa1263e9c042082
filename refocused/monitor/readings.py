"""Readings of GPUs and machines, and alarms: their fields, and how their files are read.

Each machine appends a line for each GPU and one for itself to `logs/gpu_metrics.jsonl`; machine N
of several to `gpu_metrics-node-N.jsonl`, since several machines cannot append to one file safely.
Alarms go to `events.jsonl` and `events-node-N.jsonl`.
"""

import collections
import contextlib
import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic

from refocused.metrics.history import unix_time
from refocused.metrics.jsonl import Record, number
from refocused.metrics.jsonl import as_record as parse_line

Severity = Literal["warning", "critical"]

MOST_BYTES = 32 << 20  # parsed of one file, in about a second; a longer file is thinned out
BLOCK_LINES = 64  # kept or skipped together


@dataclasses.dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one time; None: the GPU, its driver or its mode does not report it."""

    kind: ClassVar[str] = "gpu"

    host: str  # the machine's name
    index: int  # NVML's number of the GPU, in the order of the PCI bus
    uuid: str | None = None  # the GPU's own, in any machine
    name: str | None = None  # the model of the GPU
    local_rank: int | None = None  # by CUDA_VISIBLE_DEVICES; None: no rank of this run has it
    lost: bool = False  # fallen off the bus; all measurements are None
    utilization_fraction: float | None = None  # share of the time in which any kernel ran
    memory_used_gb: float | None = None  # by any process
    memory_total_gb: float | None = None  # of the GPU
    temperature_celsius: int | None = None  # of the chip
    slowdown_celsius: int | None = None  # at which the chip slows itself down
    memory_temperature_celsius: int | None = None  # of the HBM
    power_watts: float | None = None  # drawn now
    power_limit_watts: float | None = None  # that it may draw
    sm_clock_mhz: int | None = None  # now
    sm_clock_max_mhz: int | None = None  # highest of this GPU
    memory_clock_mhz: int | None = None  # now
    # `hw_slowdown`, `sw_thermal`, `hw_thermal`, `hw_power_brake`; not the power limit, which a busy
    # and healthy GPU reaches
    throttle_reasons: tuple[str, ...] | None = None
    clock_event_bits: int | None = None  # all of NVML's reasons for a lower clock
    ecc_corrected: int | None = None  # memory errors, since the driver was loaded (the next too)
    ecc_uncorrected: int | None = None  # memory errors that spoilt data
    remapped_rows: int | None = None  # of memory, replaced by spare ones in the GPU's life
    remap_pending: bool | None = None  # until the GPU is reset
    remap_failed: bool | None = None  # no spare rows: the GPU must be replaced
    nvlinks_active: int | None = None  # that are up
    nvlinks_total: int | None = None  # that the GPU has
    nvlink_errors: int | None = None  # on all links, since the driver was loaded
    nvlink_sent_gb_per_second: float | None = None  # over all links, mean of half a minute
    nvlink_received_gb_per_second: float | None = None  # likewise
    pcie_generation: int | None = None  # now; that of an idle GPU is lower
    pcie_generation_max: int | None = None  # of this GPU in this slot
    pcie_width: int | None = None  # lanes now
    pcie_width_max: int | None = None  # lanes of this GPU in this slot
    pcie_replays: int | None = None  # repeated packets since the driver was loaded
    mig: bool | None = None  # split into instances
    processes: dict[int, float | None] | None = None  # GB by process id; None: unknown


@dataclasses.dataclass(frozen=True, slots=True)
class SystemSample:
    """One machine at one time; None: unknown. Rates are since the last reading."""

    kind: ClassVar[str] = "system"

    host: str  # the machine's name
    gpus: int | None = None  # that NVML counts; None: there is no NVML
    gpu_note: str | None = None  # why there are no GPU readings
    cpu_fraction: float | None = None  # of all cores' time
    cpu_cores: int | None = None  # that the machine has
    load_1m: float | None = None  # runnable processes, mean of a minute
    memory_used_gb: float | None = None  # no longer available to processes
    memory_total_gb: float | None = None  # of the machine, or of the container if that is less
    swap_used_gb: float | None = None  # of the machine
    disk_free_gb: float | None = None  # for this user, on the disk of the run's folder
    disk_total_gb: float | None = None  # size of that disk
    disk_read_mb_per_second: float | None = None  # all disks
    disk_written_mb_per_second: float | None = None  # all disks
    network_received_mb_per_second: float | None = None  # all devices but the loopback
    network_sent_mb_per_second: float | None = None  # likewise


class Rates:
    """Rates of counters since they were last read."""

    def __init__(self) -> None:
        self._before: tuple[float, Sequence[float | None]] | None = None

    def since_last(self, now: float, counts: Sequence[float | None]) -> list[float | None]:
        """Return each counter's rate per second; None if it is new, unknown or was reset."""
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
    """An alarm that is raised or cleared; `alarm` and `subject` identify it."""

    kind: ClassVar[str] = "alarm"

    alarm: str  # the rule: `gpu_temperature`
    subject: str  # what it is about: `node1 GPU 5`, `run`
    raised: bool  # or cleared
    severity: Severity  # `critical` needs action now
    text: str  # what was found, as a sentence
    host: str  # the machine that noticed it
    advice: str = ""  # what to do about it


_SAMPLES: dict[str, pydantic.TypeAdapter[Any]] = {
    sample.kind: pydantic.TypeAdapter(sample) for sample in (GpuSample, SystemSample)
}


def sample_of(record: Record) -> GpuSample | SystemSample | None:
    """Read a line of readings; a damaged field is unknown. None: nothing shows what it is about."""
    sample: GpuSample | SystemSample | None = None
    with contextlib.suppress(KeyError, pydantic.ValidationError):
        adapter = _SAMPLES[str(record.get("kind"))]
        try:
            sample = adapter.validate_python(record)
        except pydantic.ValidationError as error:
            damaged = {problem["loc"][0] for problem in error.errors()}
            whole = {name: value for name, value in record.items() if name not in damaged}
            sample = adapter.validate_python(whole)
    return sample


def as_record(sample: GpuSample | SystemSample | AlarmEvent) -> dict[str, Any]:
    """Return a sample's line: its kind, and its fields under their own names."""
    names = sample.__slots__  # dataclasses.asdict copies deeply, at ten times the cost
    return {"kind": sample.kind, **{name: getattr(sample, name) for name in names}}


@dataclasses.dataclass(frozen=True, slots=True)
class GpuMinute:
    """All GPUs of a run in one minute; those of its machines where no ranks are known."""

    time: float  # at its start, in Unix seconds
    utilization_fraction: float | None  # mean over the GPUs
    hottest_celsius: float | None  # of any GPU
    power_watts: float | None  # mean of a GPU
    memory_gb: float | None  # the most in use on any GPU


def read_gpu_minutes(logs: Path) -> list[GpuMinute]:
    """Read the readings of all machines in a folder of logs; of long files, even spread blocks."""

    def records(file: Path) -> Iterator[Record]:
        with contextlib.suppress(OSError), file.open("rb") as lines:  # else show what was read
            share = file.stat().st_size // MOST_BYTES + 1
            for number, line in enumerate(lines):
                if number // BLOCK_LINES % share == 0 and (record := parse_line(line)) is not None:
                    yield record

    files = sorted(logs.glob("gpu_metrics*.jsonl"))
    return gpu_minutes(record for file in files for record in records(file))


def gpu_minutes(records: Iterable[Record]) -> list[GpuMinute]:
    """Group GPU readings by minute, in ascending order."""
    by_minute: dict[float, list[Record]] = collections.defaultdict(list)
    for record in records:
        at = unix_time(record.get("time"))
        if record.get("kind") == GpuSample.kind and at is not None:
            by_minute[at // 60 * 60].append(record)
    minutes = []
    names = ("utilization_fraction", "temperature_celsius", "power_watts", "memory_used_gb")
    for minute, samples in sorted(by_minute.items()):
        of_run = [sample for sample in samples if sample.get("local_rank") is not None] or samples
        busy, celsius, watts, gb = (
            [value for sample in of_run if (value := number(sample, name)) is not None]
            for name in names
        )
        use, power = (statistics.fmean(some) if some else None for some in (busy, watts))
        most = max(celsius, default=None), max(gb, default=None)
        minutes.append(GpuMinute(minute, use, most[0], power, most[1]))
    return minutes
