from __future__ import annotations

import pytest

from refocused.monitor.readings import SystemSample
from refocused.monitor.sampler.alarm_rules import DiskPoint, hours_until_full, system_readings
from refocused.monitor.sampler.alarms import Reading


def falling(start_gib: float, gib_per_hour: float, *, hours: float) -> list[DiskPoint]:
    """A disk that fills evenly, seen once a minute."""
    minutes = range(round(60 * hours) + 1)
    return [(60.0 * m, start_gib - gib_per_hour * m / 60) for m in minutes]


@pytest.mark.parametrize(
    ("disk", "hours"),
    [
        ([], None),
        (falling(100, 20, hours=1), 4.0),
        (falling(100, 20, hours=0.3), None),  # too short to tell a trend from a save
        (falling(100, -5, hours=1), None),
        (falling(100, 0, hours=1), None),
        (falling(100, 10, hours=3), 7.0),
    ],
)
def test_hours_until_a_disk_is_full(disk: list[DiskPoint], hours: float | None) -> None:
    assert hours_until_full(disk) == (None if hours is None else pytest.approx(hours))


def test_only_the_last_hour_counts() -> None:
    disk = [(0.0, 900.0), (3600.0, 100.0), (7200.0, 50.0)]
    assert hours_until_full(disk) == pytest.approx(1.0)


def readings(system: SystemSample, disk: list[DiskPoint] | None = None) -> dict[str, Reading]:
    return {reading.alarm: reading for reading in system_readings(system, disk or [])}


@pytest.mark.parametrize(
    ("free", "total", "level"),
    [(4.9, 100, "bad"), (8.0, 100, "between"), (11.0, 100, "good"), (19.0, 1000, "bad")],
)
def test_a_full_disk(free: float, total: float, level: str) -> None:
    system = SystemSample(host="node1", disk_free_gib=free, disk_total_gib=total)
    assert readings(system)["disk_full"].level == level


@pytest.mark.parametrize(("hours", "level"), [(2.9, "bad"), (4.0, "between"), (7.0, "good")])
def test_a_filling_disk_says_for_how_long_there_is_room(hours: float, level: str) -> None:
    disk = falling(60 * (hours + 1), 60, hours=1)
    system = SystemSample(host="node1", disk_free_gib=disk[-1][1], disk_total_gib=1000)
    reading = readings(system, disk)["disk_filling"]
    assert reading.level == level
    assert f"full in {hours} h" in reading.text


@pytest.mark.parametrize(("used", "level"), [(95.0, "bad"), (92.0, "between"), (90.0, "good")])
def test_memory(used: float, level: str) -> None:
    system = SystemSample(host="node1", memory_used_gib=used, memory_total_gib=100.0)
    assert readings(system)["memory"].level == level


def test_what_is_unknown_is_no_alarm() -> None:
    assert readings(SystemSample(host="node1")) == {}
