import dataclasses
from typing import Any

import pytest

from refocused.doctor.machine import Gpus, chosen, fewest_links, judge_gpus, smallest_memory_bytes
from refocused.monitor.readings import GpuSample

HEALTHY = GpuSample(
    host="node1",
    index=0,
    name="NVIDIA H100 80GB HBM3",
    memory_total_gb=80.0,
    memory_used_gb=0.5,
    temperature_celsius=31,
    throttle_reasons=(),
    ecc_uncorrected=0,
    remap_pending=False,
    remap_failed=False,
    nvlinks_active=18,
    nvlinks_total=18,
    mig=False,
    processes={},
)
GOOD = Gpus(
    samples=tuple(dataclasses.replace(HEALTHY, index=index) for index in range(4)),
    driver="570.86",
    driver_cuda=(12, 8),
    torch_cuda="12.8",
    torch_count=4,
)
LOST = {"lost": True, "name": None, "nvlinks_active": None}


def with_one(**facts: Any) -> Gpus:
    odd = dataclasses.replace(GOOD.samples[3], **facts)
    return dataclasses.replace(GOOD, samples=(*GOOD.samples[:3], odd))


@pytest.mark.parametrize(
    ("facts", "wanted", "check", "level", "words"),
    [
        ({}, 8, "gpus", "fail", "8 requested, found 4 x"),
        ({"name": "NVIDIA A10"}, None, "gpus", "warn", "several kinds"),
        ({"torch_cuda": None}, None, "torch", "fail", "without CUDA"),
        ({"driver_cuda": (11, 8)}, None, "torch", "fail", "but the driver supports up to 11.8"),
        ({"torch_count": 2}, 4, "torch", "fail", "torch sees 2 of the 4"),
        (LOST, None, "health", "fail", "GPU 3"),
        (LOST, None, "gpus", "ok", "4 x NVIDIA H100"),
        (LOST, None, "nvlink", "ok", "18 links"),
        ({"ecc_uncorrected": 7}, None, "health", "fail", "7 uncorrected memory errors"),
        ({"remap_pending": True}, None, "health", "warn", "a broken memory row"),
        ({"throttle_reasons": ("hw_thermal",)}, None, "health", "warn", "hw thermal"),
        ({"nvlinks_active": 12}, None, "health", "warn", "12 active NVLinks"),
        ({"mig": True}, None, "health", "warn", "GPU 3 is divided by MIG"),
        (
            {"memory_used_gb": 41.5, "processes": {4711: 41.0}},
            None,
            "memory",
            "warn",
            "up to 41.5 GB of GPU 3 are in use by process 4711",
        ),
        ({"memory_used_gb": 2.1}, None, "memory", "warn", "up to 2.1 GB of GPU 3 are in use by"),
        ({"nvlinks_active": None}, None, "nvlink", "warn", "GPU 3 has no active NVLink"),
        ({}, 4, "gpus", "ok", "4 x NVIDIA H100 80GB HBM3, 80.0 GB, driver 570.86 (CUDA 12.8)"),
        ({}, 4, "health", "ok", "no memory errors"),
        ({}, 4, "nvlink", "ok", "18 links up on every GPU"),
    ],
)
def test_what_is_there_and_what_is_wrong(
    facts: dict[str, Any], wanted: int | None, check: str, level: str, words: str
) -> None:
    is_gpus = all(name in Gpus.__dataclass_fields__ for name in facts)
    found = dataclasses.replace(GOOD, **facts) if is_gpus else with_one(**facts)
    findings = list(judge_gpus(found, wanted=wanted, device="auto"))
    assert [one for one in findings if (one.check, one.level) == (check, level)], findings
    assert any(words in one.text for one in findings if (one.check, one.level) == (check, level))
    if not facts and wanted == 4:
        assert {one.level for one in findings} == {"ok"}


@pytest.mark.parametrize(
    ("device", "wanted", "is_fault", "level"),
    [
        ("auto", None, False, "warn"),
        ("auto", 8, False, "fail"),
        ("cuda", None, False, "fail"),
        ("cpu", 2, False, "ok"),
        ("auto", None, True, "fail"),
    ],
)
def test_a_machine_without_any(device: Any, wanted: int | None, is_fault: bool, level: str) -> None:
    found = Gpus(note="The NVIDIA driver does not answer.", is_fault=is_fault)
    (finding,) = judge_gpus(found, wanted=wanted, device=device)
    assert finding.level == level


def test_what_a_driver_and_a_screen_hold_is_not_reported() -> None:
    findings = judge_gpus(with_one(memory_used_gb=2.0), wanted=None, device="auto")
    assert {finding.level for finding in findings} == {"ok"}


def test_the_runs_own_gpus_count_and_of_them_the_smallest() -> None:
    busy = dataclasses.replace(HEALTHY, index=4, memory_used_gb=70.0)
    ours = [dataclasses.replace(HEALTHY, local_rank=0)]
    assert chosen([*ours, busy]) == ours
    assert chosen([busy]) == [busy]  # nobody knows whose it is
    small = with_one(memory_total_gb=40.0, nvlinks_active=None)
    assert smallest_memory_bytes(small.samples) == 40e9
    assert (fewest_links(GOOD.samples), fewest_links(small.samples)) == (18, 0)
    assert (smallest_memory_bytes(()), fewest_links(())) == (None, None)
