"""The alarm rules for GPUs and for the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from refocused.monitor.readings import GpuSample, SystemSample
from refocused.monitor.sampler.alarms import Level, Reading, level_above, level_below

DISK_HOURS, ENOUGH_DISK_HOURS = 3.0, 6.0
LEAST_DISK_FRACTION, LEAST_DISK_GIB = 0.02, 5.0
FULL_MEMORY_FRACTION, ROOMY_MEMORY_FRACTION = 0.95, 0.90
# A rate from less time would be that of a single save; retention takes back what a longer one has.
SHORTEST_TREND_SECONDS, LONGEST_TREND_SECONDS = 1200.0, 3600.0

DiskPoint = tuple[float, float]  # seconds, and GiB that were free then


def system_readings(system: SystemSample, disk: Sequence[DiskPoint]) -> Iterator[Reading]:
    """Return what the rules say of a machine.

    Args:
        system: Its last sample.
        disk: What was free on its disk, the oldest first, the last of it now.
    """
    yield from _disk(system, disk)
    if system.memory_used_gib is not None and system.memory_total_gib:
        share = system.memory_used_gib / system.memory_total_gib
        yield Reading(
            "memory",
            system.host,
            level_above(share, bad=FULL_MEMORY_FRACTION, good=ROOMY_MEMORY_FRACTION),
            f"{system.host} uses {system.memory_used_gib:.1f} of {system.memory_total_gib:.1f} "
            "GiB of memory: when it is full, the system kills a process, most likely a rank.",
            "critical",
        )


def hours_until_full(disk: Sequence[DiskPoint]) -> float | None:
    """Return in how many hours a disk is full if it goes on like that.

    Args:
        disk: What was free, the oldest first.

    Returns:
        The hours; None: it does not fill, or was not watched for long enough.
    """
    if not disk:
        return None
    end, free = disk[-1]
    recent = [point for point in disk if end - point[0] <= LONGEST_TREND_SECONDS]
    began, free_then = recent[0]
    if end - began < SHORTEST_TREND_SECONDS or free_then <= free:
        return None
    return free / (free_then - free) * (end - began) / 3600


def _disk(system: SystemSample, disk: Sequence[DiskPoint]) -> Iterator[Reading]:
    free, total = system.disk_free_gib, system.disk_total_gib
    if free is None or total is None:
        return
    least = max(LEAST_DISK_GIB, LEAST_DISK_FRACTION * total)
    room = "Make room there, or lower checkpoint.keep or data.disk_limit_gb."
    yield Reading(
        "disk_full",
        system.host,
        level_below(free, bad=least, good=2 * least),
        f"{free:.1f} GiB of {total:.0f} GiB are free on the run's disk. {room}",
        "critical",
    )
    hours = hours_until_full(disk)
    yield Reading(
        "disk_filling",
        system.host,
        "good" if hours is None else level_below(hours, bad=DISK_HOURS, good=ENOUGH_DISK_HOURS),
        f"{free:.1f} GiB are free on the run's disk"
        + (f": at this rate it is full in {hours:.1f} h. {room}" if hours is not None else "."),
        raised_after_seconds=60.0,
    )


SLOWDOWN_CELSIUS = 87  # where a GPU does not tell; that of the H100 and its like
MEMORY_CELSIUS = 95  # HBM3 is specified to this
SHORT_SECONDS = 10.0  # what lasts less is a spike
IDLE_SECONDS = 120.0  # longer than a validation or a save leaves a GPU to wait
IDLE_FRACTION, BUSY_FRACTION = 0.3, 0.5
POWER_OVER_FRACTION = 1.1


def gpu_readings(samples: Sequence[GpuSample], *, is_training: bool) -> Iterator[Reading]:
    """Return what the rules say of a machine's GPUs.

    Args:
        samples: Of one time.
        is_training: Whether the run takes steps, so that its GPUs should be at work.
    """
    for gpu in samples:
        yield Reading("gpu_lost", _name(gpu), _yes(gpu.lost), _lost_text(gpu), "critical")
        if not gpu.lost:
            peers = [other for other in samples if other.name == gpu.name]
            yield from _heat(gpu)
            yield from _memory_errors(gpu)
            yield from _links(gpu, peers)
            yield from _power(gpu, peers)
            if gpu.local_rank is not None:
                yield from _work(gpu, is_training=is_training)


def _heat(gpu: GpuSample) -> Iterator[Reading]:
    if gpu.temperature_celsius is not None:
        slowdown = gpu.slowdown_celsius or SLOWDOWN_CELSIUS
        yield Reading(
            "gpu_temperature",
            _name(gpu),
            level_above(gpu.temperature_celsius, bad=slowdown - 2, good=slowdown - 7),
            f"{_name(gpu)} is at {gpu.temperature_celsius} C; it slows down at {slowdown} C. See "
            "that its fans run and that the room is cool.",
            raised_after_seconds=SHORT_SECONDS,
        )
    if gpu.memory_temperature_celsius is not None:
        yield Reading(
            "gpu_memory_temperature",
            _name(gpu),
            level_above(
                gpu.memory_temperature_celsius, bad=MEMORY_CELSIUS, good=MEMORY_CELSIUS - 5
            ),
            f"the memory of {_name(gpu)} is at {gpu.memory_temperature_celsius} C.",
            raised_after_seconds=SHORT_SECONDS,
        )
    if gpu.throttle_reasons is not None:
        yield Reading(
            "gpu_throttle",
            _name(gpu),
            _yes(bool(gpu.throttle_reasons)),
            _throttle_text(gpu),
            raised_after_seconds=SHORT_SECONDS,
            cleared_after_seconds=3 * SHORT_SECONDS,
        )


def _memory_errors(gpu: GpuSample) -> Iterator[Reading]:
    if gpu.ecc_uncorrected is not None:
        yield Reading(
            "gpu_ecc",
            _name(gpu),
            _yes(gpu.ecc_uncorrected > 0),
            f"{_name(gpu)} has had {gpu.ecc_uncorrected:,} memory errors that could not be "
            "corrected since its driver was loaded. Look at the loss, and have the GPU reset.",
            "critical",
        )
    if gpu.remap_failed is not None:
        yield Reading(
            "gpu_remap_failed",
            _name(gpu),
            _yes(gpu.remap_failed),
            f"{_name(gpu)} has no spare rows for its broken memory: have it exchanged.",
            "critical",
        )
    if gpu.remap_pending is not None:
        yield Reading(
            "gpu_remap_pending",
            _name(gpu),
            _yes(gpu.remap_pending),
            f"{_name(gpu)} has a broken row of memory that only a reset replaces: have it reset "
            "at the next stop.",
        )


def _links(gpu: GpuSample, peers: Sequence[GpuSample]) -> Iterator[Reading]:
    """Compare with the GPUs of the same kind: what all lack is how the machine is built."""
    best_nvlink = _most(peer.nvlinks_active for peer in peers)
    if gpu.nvlinks_active is not None and best_nvlink:
        yield Reading(
            "gpu_nvlink",
            _name(gpu),
            _yes(gpu.nvlinks_active < best_nvlink),
            f"{_name(gpu)} has {gpu.nvlinks_active:g} NVLinks that are up, others have "
            f"{best_nvlink:g}: every step waits for it.",
            raised_after_seconds=SHORT_SECONDS,
        )
    best_width = _most(peer.pcie_width for peer in peers)
    if gpu.pcie_width is not None and best_width:
        yield Reading(
            "gpu_pcie",
            _name(gpu),
            _yes(gpu.pcie_width < best_width),
            f"{_name(gpu)} has {gpu.pcie_width:g} PCIe lanes, others have {best_width:g}.",
            raised_after_seconds=SHORT_SECONDS,
        )


def _power(gpu: GpuSample, peers: Sequence[GpuSample]) -> Iterator[Reading]:
    limit, highest = gpu.power_limit_watts, _most(peer.power_limit_watts for peer in peers)
    if limit and highest:
        yield Reading(
            "gpu_power_limit",
            _name(gpu),
            level_below(limit / highest, bad=0.95, good=0.97),
            f"{_name(gpu)} may draw {limit:.0f} W, others of its kind {highest:.0f} W: every step "
            "waits for it.",
            raised_after_seconds=SHORT_SECONDS,
        )
    if limit and gpu.power_watts is not None:
        yield Reading(
            "gpu_power",
            _name(gpu),
            level_above(gpu.power_watts / limit, bad=POWER_OVER_FRACTION, good=1.02),
            f"{_name(gpu)} draws {gpu.power_watts:.0f} W of {limit:.0f} W that it may.",
            raised_after_seconds=3 * SHORT_SECONDS,
        )


def _work(gpu: GpuSample, *, is_training: bool) -> Iterator[Reading]:
    """A run that takes no steps any more ends the alarm."""
    if not is_training:
        yield Reading("gpu_idle", _name(gpu), "good", f"{_name(gpu)} has no steps to compute.")
    elif gpu.utilization_fraction is not None:
        yield Reading(
            "gpu_idle",
            _name(gpu),
            level_below(gpu.utilization_fraction, bad=IDLE_FRACTION, good=BUSY_FRACTION),
            f"{_name(gpu)} is busy {gpu.utilization_fraction:.0%} of the time while the run "
            "trains. See the share of `data` in the log lines, and whether another GPU is slow.",
            raised_after_seconds=IDLE_SECONDS,
        )


def _name(gpu: GpuSample) -> str:
    return f"{gpu.host} GPU {gpu.index}"


def _lost_text(gpu: GpuSample) -> str:
    if not gpu.lost:
        return f"{_name(gpu)} answers."
    return (
        f"{_name(gpu)} ({gpu.uuid or 'of unknown UUID'}) is lost: it answers nothing any more. "
        "Restart the machine, or ask for another one; the run goes on from its last checkpoint."
    )


def _throttle_text(gpu: GpuSample) -> str:
    reasons = ", ".join(gpu.throttle_reasons or ()).replace("_", " ")
    clocks = ""
    if gpu.sm_clock_mhz is not None and gpu.sm_clock_max_mhz is not None:
        clocks = f": {gpu.sm_clock_mhz} of {gpu.sm_clock_max_mhz} MHz"
    heat = "" if gpu.temperature_celsius is None else f", {gpu.temperature_celsius} C"
    return f"{_name(gpu)} {reasons or 'not throttled'}{clocks}{heat}"


def _yes(is_bad: bool) -> Level:
    return "bad" if is_bad else "good"


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
