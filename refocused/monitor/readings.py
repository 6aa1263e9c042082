"""The records of `logs/gpu_metrics*.jsonl` and of alarms in `logs/events*.jsonl`: their fields.

A machine writes every few seconds one line for each of its GPUs and one for itself. The run's first
machine writes `gpu_metrics.jsonl`, machine N of those behind it `gpu_metrics-node-N.jsonl`, since
appending is not safe for several machines in one file; `events.jsonl` is named alike. Each line
begins with `time` (see `jsonl.JsonLines`) and `kind`, and is whole.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

Severity = Literal["warning", "critical"]


@dataclasses.dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one time; None: the GPU, its driver or its mode does not tell.

    Attributes:
        host: Name of the machine.
        index: NVML's number of the GPU on its machine, in the order of the PCI bus.
        uuid: What identifies it; None: it was lost before it could be asked.
        name: As the driver gives it.
        local_rank: Of the rank that has it by CUDA_VISIBLE_DEVICES; None: it is not of this run.
        lost: It has fallen off the bus; every measurement is then None.
        utilization_fraction: Share of the time in which any kernel ran.
        memory_used_gib: Allocated by anyone, in GiB.
        memory_total_gib: Its memory, in GiB.
        temperature_celsius: Of the chip.
        slowdown_celsius: Of the chip, from where on it slows itself down.
        memory_temperature_celsius: Of the HBM.
        power_watts: Drawn now.
        power_limit_watts: What it may draw.
        sm_clock_mhz: Of the multiprocessors.
        sm_clock_max_mhz: The highest one.
        memory_clock_mhz: Of the memory.
        throttle_reasons: Why the clock is lowered, where that is no good sign: `hw_slowdown`,
            `sw_thermal`, `hw_thermal`, `hw_power_brake`. At its power limit a GPU is busy, not ill.
        clock_event_bits: All of NVML's reasons as it gives them.
        ecc_corrected: Memory errors corrected since the driver was loaded.
        ecc_uncorrected: Memory errors that were not.
        remapped_rows: Memory rows replaced by spare ones, in the GPU's life.
        remap_pending: A row waits for a reset of the GPU to be replaced.
        remap_failed: A row could not be replaced: the GPU is to be exchanged.
        nvlinks_active: NVLinks that are up.
        nvlinks_total: NVLinks that the GPU has.
        nvlink_errors: Errors on all of them, since the driver was loaded.
        nvlink_sent_gib_per_second: Over all of them, mean of about half a minute.
        nvlink_received_gib_per_second: Over all of them, mean of about half a minute.
        pcie_generation: Of the link to the host now; an idle one is lower.
        pcie_generation_max: That the GPU and its slot allow.
        pcie_width: Lanes of that link now.
        pcie_width_max: Lanes that the GPU and its slot allow.
        pcie_replays: Packets repeated on it, since the driver was loaded.
        mig: Whether it is cut into slices.
        processes: Those that have memory on it, by process id: GiB, None where unknown.
    """

    kind: ClassVar[str] = "gpu"

    host: str
    index: int
    uuid: str | None = None
    name: str | None = None
    local_rank: int | None = None
    lost: bool = False
    utilization_fraction: float | None = None
    memory_used_gib: float | None = None
    memory_total_gib: float | None = None
    temperature_celsius: int | None = None
    slowdown_celsius: int | None = None
    memory_temperature_celsius: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    clock_event_bits: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    nvlinks_active: int | None = None
    nvlinks_total: int | None = None
    nvlink_errors: int | None = None
    nvlink_sent_gib_per_second: float | None = None
    nvlink_received_gib_per_second: float | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    mig: bool | None = None
    processes: dict[int, float | None] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SystemSample:
    """One machine at one time; None: unknown.

    Attributes:
        host: Its name.
        gpus: GPUs that NVML counts; None: there is no NVML.
        gpu_note: Why there are no lines of GPUs, where there are none.
        cpu_fraction: Share of all cores' time that was used since the last sample.
        cpu_cores: Cores that the system has.
        load_1m: Processes that ran or wanted to, mean of a minute.
        memory_used_gib: Memory that is not available any more, in GiB.
        memory_total_gib: The machine's, or the container's where that is less, in GiB.
        swap_used_gib: In GiB.
        disk_free_gib: On the disk of the run's folder, for us, in GiB.
        disk_total_gib: Of that disk, in GiB.
        disk_read_mib_per_second: From all disks, since the last sample.
        disk_written_mib_per_second: To all disks, since the last sample.
        network_received_mib_per_second: Over all devices but the loopback, since the last sample.
        network_sent_mib_per_second: Over all devices but the loopback, since the last sample.
    """

    kind: ClassVar[str] = "system"

    host: str
    gpus: int | None = None
    gpu_note: str | None = None
    cpu_fraction: float | None = None
    cpu_cores: int | None = None
    load_1m: float | None = None
    memory_used_gib: float | None = None
    memory_total_gib: float | None = None
    swap_used_gib: float | None = None
    disk_free_gib: float | None = None
    disk_total_gib: float | None = None
    disk_read_mib_per_second: float | None = None
    disk_written_mib_per_second: float | None = None
    network_received_mib_per_second: float | None = None
    network_sent_mib_per_second: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AlarmEvent:
    """An alarm that begins or ends: a line of `events.jsonl`.

    Attributes:
        alarm: Which rule (`gpu_temperature`).
        subject: Whom it is about (`node1 GPU 5`, `run`); with `alarm` it names one alarm.
        raised: Whether it begins; the line with False ends it.
        severity: `critical`: somebody should act now.
        text: What a person reads.
        host: Of the machine that saw it.
    """

    kind: ClassVar[str] = "alarm"

    alarm: str
    subject: str
    raised: bool
    severity: Severity
    text: str
    host: str


def as_record(sample: GpuSample | SystemSample | AlarmEvent) -> dict[str, Any]:
    """Return a sample's line: its kind, and its fields under their own names."""
    names = sample.__slots__  # dataclasses.asdict copies deeply, at ten times the cost
    return {"kind": sample.kind, **{name: getattr(sample, name) for name in names}}
