"""The rules for the machine: a disk that fills, memory that runs out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from refocused.monitor.readings import SystemSample
from refocused.monitor.sampler.alarms import Reading, level_above, level_below

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
