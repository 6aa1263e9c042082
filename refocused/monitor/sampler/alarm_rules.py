"""The alarm rules for GPUs and for the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from refocused.monitor.readings import GpuSample, SystemSample
from refocused.monitor.sampler.alarms import Reading, bad_above, bad_below, bad_if

SLOWDOWN_CELSIUS = 87  # of a GPU that does not tell; that of the H100 and similar ones
MEMORY_CELSIUS = 95  # HBM3 is specified up to this
SHORT_SECONDS = 10.0  # what lasts less is a spike
IDLE_SECONDS = 120.0  # longer than a validation or a save leaves a GPU idle


def gpu_readings(samples: Sequence[GpuSample], *, is_training: bool) -> Iterator[Reading]:
    """Return what the rules find of a machine's GPUs.

    Args:
        samples: Of one time.
        is_training: Whether the run takes steps, so that its GPUs should be busy.
    """
    for gpu in samples:
        name = f"{gpu.host} GPU {gpu.index}"
        lost = (
            f"({gpu.uuid or 'of unknown UUID'}) is lost: it answers nothing any more. Restart the "
            "machine, or ask for another one; the run goes on from its last checkpoint."
        )
        text = f"{name} {lost if gpu.lost else 'answers.'}"
        yield from bad_if("gpu_lost", name, gpu.lost, text, severity="critical")
        if not gpu.lost:
            peers = [other for other in samples if other.name == gpu.name]
            yield from _heat(gpu, name)
            yield from _memory_errors(gpu, name)
            yield from _beside_others(gpu, name, peers)
            if gpu.local_rank is not None:
                yield from _work(gpu, name, is_training=is_training)


def _heat(gpu: GpuSample, name: str) -> Iterator[Reading]:
    slowdown = gpu.slowdown_celsius or SLOWDOWN_CELSIUS
    yield from bad_above(
        "gpu_temperature",
        name,
        gpu.temperature_celsius,
        (slowdown - 2, slowdown - 7),
        text=f"{name} is at {gpu.temperature_celsius} C; it slows down at {slowdown} C. See that "
        "its fans run and that the room is cool.",
        raised_after_seconds=SHORT_SECONDS,
    )
    yield from bad_above(
        "gpu_memory_temperature",
        name,
        gpu.memory_temperature_celsius,
        (MEMORY_CELSIUS, MEMORY_CELSIUS - 5),
        text=f"the memory of {name} is at {gpu.memory_temperature_celsius} C.",
        raised_after_seconds=SHORT_SECONDS,
    )
    if gpu.throttle_reasons is not None:
        reasons = ", ".join(gpu.throttle_reasons).replace("_", " ") or "not throttled"
        clocks = ""
        if gpu.sm_clock_mhz is not None and gpu.sm_clock_max_mhz is not None:
            clocks = f": {gpu.sm_clock_mhz} of {gpu.sm_clock_max_mhz} MHz"
        heat = "" if gpu.temperature_celsius is None else f", {gpu.temperature_celsius} C"
        yield from bad_if(
            "gpu_throttle",
            name,
            bool(gpu.throttle_reasons),
            f"{name} {reasons}{clocks}{heat}",
            raised_after_seconds=SHORT_SECONDS,
            cleared_after_seconds=3 * SHORT_SECONDS,
        )
    power, limit = gpu.power_watts, gpu.power_limit_watts
    if limit and power is not None:
        yield from bad_above(
            "gpu_power",
            name,
            power / limit,
            (1.1, 1.02),
            text=f"{name} draws {power:.0f} W of {limit:.0f} W that it may.",
            raised_after_seconds=3 * SHORT_SECONDS,
        )


def _memory_errors(gpu: GpuSample, name: str) -> Iterator[Reading]:
    errors = gpu.ecc_uncorrected
    yield from bad_if(
        "gpu_ecc",
        name,
        None if errors is None else errors > 0,
        f"{name} has had {errors or 0:,} memory errors that could not be corrected since its "
        "driver was loaded. Look at the loss, and have the GPU reset.",
        severity="critical",
    )
    yield from bad_if(
        "gpu_remap_failed",
        name,
        gpu.remap_failed,
        f"{name} has no spare rows for its broken memory: have it exchanged.",
        severity="critical",
    )
    yield from bad_if(
        "gpu_remap_pending",
        name,
        gpu.remap_pending,
        f"{name} has a broken row of memory that only a reset replaces: have it reset at the next "
        "stop.",
    )


def _beside_others(gpu: GpuSample, name: str, peers: Sequence[GpuSample]) -> Iterator[Reading]:
    """Compare with the GPUs of the same kind: what all lack is how the machine is built."""
    most = _most(peer.nvlinks_active for peer in peers)
    if gpu.nvlinks_active is not None and most:
        yield from bad_if(
            "gpu_nvlink",
            name,
            gpu.nvlinks_active < most,
            f"{name} has {gpu.nvlinks_active:g} NVLinks that are up, others have {most:g}: every "
            "step waits for it.",
            raised_after_seconds=SHORT_SECONDS,
        )
    most = _most(peer.pcie_width for peer in peers)
    if gpu.pcie_width is not None and most:
        yield from bad_if(
            "gpu_pcie",
            name,
            gpu.pcie_width < most,
            f"{name} has {gpu.pcie_width:g} PCIe lanes, others have {most:g}.",
            raised_after_seconds=SHORT_SECONDS,
        )
    limit, most = gpu.power_limit_watts, _most(peer.power_limit_watts for peer in peers)
    if limit and most:
        yield from bad_below(
            "gpu_power_limit",
            name,
            limit / most,
            (0.95, 0.97),
            text=f"{name} may draw {limit:.0f} W, others of its kind {most:.0f} W: every step "
            "waits for it.",
            raised_after_seconds=SHORT_SECONDS,
        )


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _work(gpu: GpuSample, name: str, *, is_training: bool) -> Iterator[Reading]:
    if not is_training:  # ends the alarm of a run that has stopped
        yield Reading("gpu_idle", name, "good", f"{name} has no steps to compute.")
        return
    busy = gpu.utilization_fraction
    yield from bad_below(
        "gpu_idle",
        name,
        busy,
        (0.3, 0.5),
        text=f"{name} is busy {busy or 0:.0%} of the time while the run trains. See the share of "
        "`data` in the log lines, and whether another GPU is slow.",
        raised_after_seconds=IDLE_SECONDS,
    )


DISK_HOURS = 3.0, 6.0
LEAST_DISK_FRACTION, LEAST_DISK_GIB = 0.02, 5.0
# A shorter trend would be that of a single save; retention takes back what a longer one has.
SHORTEST_TREND_SECONDS, LONGEST_TREND_SECONDS = 1200.0, 3600.0

DiskPoint = tuple[float, float]  # seconds, and GiB that were free then


def system_readings(system: SystemSample, disk: Sequence[DiskPoint]) -> Iterator[Reading]:
    """Return what the rules find of a machine.

    Args:
        system: Its last reading.
        disk: What was free on its disk, the oldest first, the last of it now.
    """
    free, total = system.disk_free_gib, system.disk_total_gib
    if free is not None and total is not None:
        least = max(LEAST_DISK_GIB, LEAST_DISK_FRACTION * total)
        room = "Make room there, or lower checkpoint.keep or data.disk_limit_gb."
        yield from bad_below(
            "disk_full",
            system.host,
            free,
            (least, 2 * least),
            text=f"{free:.1f} GiB of {total:.0f} GiB are free on the run's disk. {room}",
            severity="critical",
        )
        hours = hours_until_full(disk)
        rate = "." if hours is None else f": at this rate it is full in {hours:.1f} h. {room}"
        yield from bad_below(
            "disk_filling",
            system.host,
            float("inf") if hours is None else hours,
            DISK_HOURS,
            text=f"{free:.1f} GiB are free on the run's disk{rate}",
            raised_after_seconds=60.0,
        )
    used, memory = system.memory_used_gib, system.memory_total_gib
    if used is not None and memory:
        yield from bad_above(
            "memory",
            system.host,
            used / memory,
            (0.95, 0.90),
            text=f"{system.host} uses {used:.1f} of {memory:.1f} GiB of memory: when it is full, "
            "the system kills a process, most likely a rank.",
            severity="critical",
        )


def hours_until_full(disk: Sequence[DiskPoint]) -> float | None:
    """Return when a disk is full at this rate; None: never, or it was not watched long enough."""
    if not disk:
        return None
    end, free = disk[-1]
    began, free_then = next(point for point in disk if end - point[0] <= LONGEST_TREND_SECONDS)
    if end - began < SHORTEST_TREND_SECONDS or free_then <= free:
        return None
    return free / (free_then - free) * (end - began) / 3600
