"""Alarms of GPUs, disk and memory."""

import dataclasses
from typing import Any

import pytest
from monitor.watched_run import GPU, by_alarm

from refocused.monitor.readings import GpuSample, SystemSample
from refocused.monitor.sampler.alarms import (
    DiskPoint,
    gpu_readings,
    hours_until_full,
    system_readings,
)

COOL = dataclasses.replace(
    GPU,
    uuid="GPU-5c0ffee0-0000-4000-8000-000000000005",
    name="NVIDIA H100 80GB HBM3",
    temperature_celsius=61,
    slowdown_celsius=87,
    memory_temperature_celsius=70,
    power_watts=540.2,
    sm_clock_mhz=1305,
    remap_pending=False,
    remap_failed=False,
    pcie_width=16,
)


def gpu(index: int, **changes: Any) -> GpuSample:
    return dataclasses.replace(COOL, index=index, local_rank=index, **changes)


def test_nothing_is_wrong_with_a_busy_gpu() -> None:
    found = list(gpu_readings([gpu(0), gpu(1), gpu(2)], is_training=True))
    assert {reading.level for reading in found} == {"good"}
    assert len({reading.alarm for reading in found}) == 12


@pytest.mark.parametrize(
    ("changes", "alarm", "level", "words"),
    [
        ({"lost": True}, "gpu_lost", "bad", "node1 GPU 1 (GPU-5c0ffee0"),
        ({"lost": True, "uuid": None}, "gpu_lost", "bad", "unknown UUID"),
        ({"temperature_celsius": 85}, "gpu_temperature", "bad", "85 C; it slows down at 87 C"),
        ({"temperature_celsius": 84}, "gpu_temperature", "between", ""),
        ({"temperature_celsius": 93, "slowdown_celsius": 98}, "gpu_temperature", "between", ""),
        ({"temperature_celsius": 85, "slowdown_celsius": None}, "gpu_temperature", "bad", "87 C"),
        ({"memory_temperature_celsius": 95}, "gpu_memory_temperature", "bad", "95 C"),
        (
            {"throttle_reasons": ("hw_thermal",), "temperature_celsius": 88},
            "gpu_throttle",
            "bad",
            "node1 GPU 1 is throttled (hw thermal): 1305 of 1980 MHz, 88 C.",
        ),
        ({"ecc_uncorrected": 2}, "gpu_ecc", "bad", "2 uncorrected memory errors"),
        ({"remap_failed": True}, "gpu_remap_failed", "bad", "no spare rows"),
        ({"remap_pending": True}, "gpu_remap_pending", "bad", "a reset will replace"),
        ({"nvlinks_active": 17}, "gpu_nvlink", "bad", "17 active NVLinks; others of its kind h"),
        ({"pcie_width": 8}, "gpu_pcie", "bad", "8 PCIe lanes; others of its kind have 16"),
        ({"pcie_generation": 1}, "gpu_pcie", "good", ""),  # an idle link saves power
        ({"power_limit_watts": 500.0}, "gpu_power_limit", "bad", "500 W; others of its kind 7"),
        ({"power_watts": 771.0}, "gpu_power", "bad", "771 W; its limit is 700 W"),
        ({"utilization_fraction": 0.3}, "gpu_idle", "bad", "busy 30% of the time"),
        # A GPU of another kind is no measure.
        ({"name": "NVIDIA L4", "pcie_width": 8}, "gpu_pcie", "good", ""),
        ({"name": "L4", "power_limit_watts": 600.0}, "gpu_power_limit", "good", ""),
    ],
)
def test_a_gpu_among_healthy_ones(
    changes: dict[str, Any], alarm: str, level: str, words: str
) -> None:
    found = list(gpu_readings([gpu(0), gpu(1, **changes), gpu(2)], is_training=True))
    one = by_alarm(found, "node1 GPU 1")[alarm]
    assert one.level == level
    assert words in one.text
    for other in ("node1 GPU 0", "node1 GPU 2"):
        assert by_alarm(found, other)[alarm].level == "good"


@pytest.mark.parametrize(
    ("alarm", "field", "bad", "between", "good"),
    [
        ("gpu_temperature", "temperature_celsius", 85, 84, 80),
        ("gpu_memory_temperature", "memory_temperature_celsius", 95, 94, 90),
        ("gpu_power", "power_watts", 770.5, 769.0, 714.0),
        ("gpu_power_limit", "power_limit_watts", 665.0, 666.0, 679.0),
        ("gpu_idle", "utilization_fraction", 0.3, 0.31, 0.5),
        ("gpu_ecc", "ecc_uncorrected", 1, None, 0),
        ("gpu_nvlink", "nvlinks_active", 17, None, 18),
    ],
)
def test_both_sides_of_a_limit(
    alarm: str, field: str, bad: float, between: float | None, good: float
) -> None:
    for level, amount in {"bad": bad, "between": between, "good": good}.items():
        if amount is not None:
            gpus = [gpu(0), gpu(1, **{field: amount})]
            found = by_alarm(gpu_readings(gpus, is_training=True), "node1 GPU 1")[alarm]
            assert found.level == level


def test_what_all_gpus_lack_is_how_the_machine_is_built() -> None:
    changes = {"nvlinks_active": 0, "pcie_width": 8, "power_limit_watts": 350.0}
    gpus = [gpu(index, power_watts=300.0, **changes) for index in range(4)]
    assert {one.level for one in gpu_readings(gpus, is_training=True)} == {"good"}


def test_only_gpus_that_should_work_are_idle() -> None:
    idle = gpu(0, utilization_fraction=0.0)
    assert by_alarm(gpu_readings([idle], is_training=True))["gpu_idle"].level == "bad"
    assert by_alarm(gpu_readings([idle], is_training=False))["gpu_idle"].level == "good"
    nobodys = dataclasses.replace(idle, local_rank=None)
    assert "gpu_idle" not in by_alarm(gpu_readings([nobodys], is_training=True))


def test_what_is_unknown_is_no_alarm_and_no_all_clear() -> None:
    for lost in (False, True):
        unknown = GpuSample(host="node1", index=0, lost=lost)
        assert set(by_alarm(gpu_readings([unknown], is_training=True))) == {"gpu_lost"}
    assert by_alarm(system_readings(SystemSample(host="node1"), [])) == {}


def falling(start_gb: float, gb_per_hour: float, *, hours: float) -> list[DiskPoint]:
    """A disk that fills evenly, seen once a minute."""
    minutes = range(round(60 * hours) + 1)
    return [(60.0 * m, start_gb - gb_per_hour * m / 60) for m in minutes]


@pytest.mark.parametrize(
    ("disk", "hours"),
    [
        ([], None),
        (falling(100, 20, hours=1), 4.0),
        (falling(100, 20, hours=0.3), None),  # too short to tell a trend from a save
        (falling(100, -5, hours=1), None),
        ([(0.0, 900.0), (3600.0, 100.0), (7200.0, 50.0)], 1.0),  # only the last hour counts
    ],
)
def test_hours_until_a_disk_is_full(disk: list[DiskPoint], hours: float | None) -> None:
    assert hours_until_full(disk) == (None if hours is None else pytest.approx(hours))


@pytest.mark.parametrize(
    ("alarm", "free", "total", "level"),
    [
        ("disk_full", 5.0, 100, "bad"),
        ("disk_full", 5.1, 100, "between"),
        ("disk_full", 10.0, 100, "good"),
        ("disk_full", 20.0, 1000, "bad"),  # 2 %
        ("disk_full", 20.1, 1000, "between"),
        ("disk_full", 40.0, 1000, "good"),
        ("memory", 5.0, 100.0, "bad"),
        ("memory", 5.1, 100.0, "between"),
        ("memory", 10.0, 100.0, "good"),
    ],
)
def test_disk_and_memory(alarm: str, free: float, total: float, level: str) -> None:
    used = {"memory_used_gb": total - free, "memory_total_gb": total}
    system = SystemSample("node1", disk_free_gb=free, disk_total_gb=total, **used)
    found = by_alarm(system_readings(system, []))
    assert (found[alarm].level, found["disk_filling"].level) == (level, "good")


@pytest.mark.parametrize(
    ("gb_per_hour", "level", "words"),
    [
        (25, "bad", "full in 3.0 h"),
        (24, "between", "full in 3.2 h"),
        (14, "good", "full in 6.1 h"),
        (-5, "good", "free on the run's disk."),
    ],
)
def test_a_disk_that_fills(gb_per_hour: float, level: str, words: str) -> None:
    system = SystemSample("node1", disk_free_gb=100.0, disk_total_gb=1000.0)
    disk = falling(100, gb_per_hour, hours=1)
    found = by_alarm(system_readings(system, disk))["disk_filling"]
    assert (found.level, words in found.text) == (level, True)
