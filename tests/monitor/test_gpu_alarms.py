from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_samples import HOT_GPU

from refocused.monitor.readings import GpuSample
from refocused.monitor.sampler.alarm_rules import gpu_readings
from refocused.monitor.sampler.alarms import Reading

COOL = dataclasses.replace(
    HOT_GPU,
    temperature_celsius=61,
    memory_temperature_celsius=70,
    throttle_reasons=(),
    clock_event_bits=0x4,
)


def gpu(index: int, **changes: Any) -> GpuSample:
    return dataclasses.replace(COOL, index=index, local_rank=index, **changes)


def readings(*gpus: GpuSample, is_training: bool = True) -> dict[tuple[str, str], Reading]:
    found = list(gpu_readings(gpus, is_training=is_training))
    by_key = {(reading.alarm, reading.subject): reading for reading in found}
    assert len(by_key) == len(found)
    return by_key


def test_nothing_is_wrong_with_a_busy_gpu() -> None:
    found = readings(gpu(0), gpu(1), gpu(2))
    assert {reading.level for reading in found.values()} == {"good"}
    assert len({alarm for alarm, _ in found}) == 12


@pytest.mark.parametrize(
    ("changes", "alarm", "level", "words"),
    [
        ({"lost": True}, "gpu_lost", "bad", "node1 GPU 1 (GPU-5c0ffee0"),
        ({"lost": True, "uuid": None}, "gpu_lost", "bad", "of unknown UUID"),
        ({"temperature_celsius": 85}, "gpu_temperature", "bad", "85 C; it slows down at 87 C"),
        ({"temperature_celsius": 84}, "gpu_temperature", "between", ""),
        ({"temperature_celsius": 80}, "gpu_temperature", "good", ""),
        ({"temperature_celsius": 93, "slowdown_celsius": 98}, "gpu_temperature", "between", ""),
        ({"temperature_celsius": 85, "slowdown_celsius": None}, "gpu_temperature", "bad", "87 C"),
        ({"memory_temperature_celsius": 95}, "gpu_memory_temperature", "bad", "95 C"),
        ({"memory_temperature_celsius": 91}, "gpu_memory_temperature", "between", ""),
        (
            {"throttle_reasons": ("hw_thermal",), "temperature_celsius": 88},
            "gpu_throttle",
            "bad",
            "node1 GPU 1 hw thermal: 1305 of 1980 MHz, 88 C",
        ),
        ({"ecc_uncorrected": 2}, "gpu_ecc", "bad", "2 memory errors"),
        ({"ecc_corrected": 9000}, "gpu_ecc", "good", ""),
        ({"remap_failed": True}, "gpu_remap_failed", "bad", "exchanged"),
        ({"remap_pending": True}, "gpu_remap_pending", "bad", "reset"),
        ({"nvlinks_active": 17}, "gpu_nvlink", "bad", "17 NVLinks that are up, others have 18"),
        ({"pcie_width": 8}, "gpu_pcie", "bad", "8 PCIe lanes, others have 16"),
        ({"pcie_generation": 1}, "gpu_pcie", "good", ""),  # an idle link saves power
        ({"power_limit_watts": 500.0}, "gpu_power_limit", "bad", "500 W, others of its kind 700"),
        ({"power_watts": 771.0}, "gpu_power", "bad", "771 W of 700 W"),
        ({"power_watts": 705.0}, "gpu_power", "good", ""),
        ({"utilization_fraction": 0.3}, "gpu_idle", "bad", "busy 30% of the time"),
        ({"utilization_fraction": 0.4}, "gpu_idle", "between", ""),
    ],
)
def test_a_gpu_among_healthy_ones(
    changes: dict[str, Any], alarm: str, level: str, words: str
) -> None:
    found = readings(gpu(0), gpu(1, **changes), gpu(2))
    reading = found[alarm, "node1 GPU 1"]
    assert reading.level == level
    assert words in reading.text
    assert found[alarm, "node1 GPU 0"].level == found[alarm, "node1 GPU 2"].level == "good"


def test_what_all_gpus_lack_is_how_the_machine_is_built() -> None:
    changes = {"nvlinks_active": 0, "pcie_width": 8, "power_limit_watts": 350.0}
    found = readings(*(gpu(index, power_watts=300.0, **changes) for index in range(4)))
    assert {reading.level for reading in found.values()} == {"good"}


def test_a_gpu_of_another_kind_is_no_measure() -> None:
    found = readings(gpu(0), gpu(1, name="NVIDIA L4", pcie_width=8, power_limit_watts=72.0))
    assert found["gpu_pcie", "node1 GPU 1"].level == "good"
    assert found["gpu_power_limit", "node1 GPU 1"].level == "good"


def test_only_gpus_that_should_work_are_idle() -> None:
    idle = gpu(0, utilization_fraction=0.0)
    assert readings(idle)["gpu_idle", "node1 GPU 0"].level == "bad"
    assert readings(idle, is_training=False)["gpu_idle", "node1 GPU 0"].level == "good"
    nobodys = dataclasses.replace(idle, local_rank=None)
    assert ("gpu_idle", "node1 GPU 0") not in readings(nobodys)


def test_what_is_unknown_is_no_alarm_and_no_all_clear() -> None:
    assert set(readings(GpuSample(host="node1", index=0))) == {("gpu_lost", "node1 GPU 0")}
    lost = GpuSample(host="node1", index=0, lost=True)
    assert set(readings(lost)) == {("gpu_lost", "node1 GPU 0")}
