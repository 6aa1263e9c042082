from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from refocused.doctor.gpus import Gpus, chosen, fewest_links, judge_gpus, smallest_memory_bytes
from refocused.monitor.readings import GpuSample

HEALTHY = GpuSample(
    host="node1",
    index=0,
    name="NVIDIA H100 80GB HBM3",
    memory_total_gib=80.0,
    memory_used_gib=0.5,
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


def with_one(**facts: object) -> Gpus:
    odd = dataclasses.replace(GOOD.samples[3], **facts)  # type: ignore[arg-type]
    return dataclasses.replace(GOOD, samples=(*GOOD.samples[:3], odd))


def test_good_ones() -> None:
    findings = {one.check: one for one in judge_gpus(GOOD, wanted=4, device="auto")}
    assert {one.level for one in findings.values()} == {"ok"}
    assert findings["gpus"].text == (
        "4 x NVIDIA H100 80GB HBM3, 80.0 GiB, driver 570.86 (CUDA 12.8)"
    )
    assert findings["health"].text.startswith("no memory errors")
    assert findings["nvlink"].text == "18 links up on every GPU"


@pytest.mark.parametrize(
    ("found", "wanted", "check", "level", "words"),
    [
        (GOOD, 8, "gpus", "fail", "8 are wanted, and there are 4 x"),
        (with_one(name="NVIDIA A10"), None, "gpus", "warn", "several kinds"),
        (dataclasses.replace(GOOD, torch_cuda=None), None, "torch", "fail", "without CUDA"),
        (
            dataclasses.replace(GOOD, driver_cuda=(11, 8)),
            None,
            "torch",
            "fail",
            "built for CUDA 12.8, and the driver runs up to 11.8",
        ),
        (dataclasses.replace(GOOD, driver_cuda=(12, 2)), None, "torch", "ok", "CUDA 12.8"),
        (dataclasses.replace(GOOD, torch_count=2), 4, "torch", "fail", "torch sees 2 of the 4"),
        (with_one(lost=True, name=None, nvlinks_active=None), None, "health", "fail", "GPU 3"),
        (
            with_one(lost=True, name=None, nvlinks_active=None),
            None,
            "gpus",
            "ok",
            "4 x NVIDIA H100",
        ),
        (with_one(lost=True, name=None, nvlinks_active=None), None, "nvlink", "ok", "18 links"),
        (with_one(ecc_uncorrected=7), None, "health", "fail", "7 memory errors"),
        (with_one(remap_pending=True), None, "health", "warn", "a broken row of memory"),
        (with_one(throttle_reasons=("hw_thermal",)), None, "health", "warn", "hw thermal"),
        (with_one(nvlinks_active=12), None, "health", "warn", "12 NVLinks"),
        (with_one(mig=True), None, "health", "warn", "GPU 3 is cut into slices"),
        (with_one(memory_used_gib=41.5), None, "memory", "warn", "not seen from here"),
        (
            with_one(memory_used_gib=41.5, processes={4711: 41.0}),
            None,
            "memory",
            "warn",
            "of GPU 3 up to 41.5 GiB are in use by process 4711",
        ),
        (with_one(nvlinks_active=None), None, "nvlink", "warn", "GPU 3 has no NVLink"),
    ],
)
def test_what_is_wrong_is_named(
    found: Gpus, wanted: int | None, check: str, level: str, words: str
) -> None:
    findings = list(judge_gpus(found, wanted=wanted, device="auto"))
    assert any(
        (one.check, one.level) == (check, level) and words in one.text for one in findings
    ), findings


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
def test_a_machine_without_any(
    device: Literal["auto", "cuda", "cpu"], wanted: int | None, is_fault: bool, level: str
) -> None:
    found = Gpus(note="The NVIDIA driver does not answer.", is_fault=is_fault)
    (finding,) = judge_gpus(found, wanted=wanted, device=device)
    assert finding.level == level


def test_gpus_of_others_are_no_matter() -> None:
    busy = dataclasses.replace(HEALTHY, index=4, memory_used_gib=70.0)
    ours = [dataclasses.replace(HEALTHY, local_rank=0)]
    assert chosen([*ours, busy]) == ours
    assert chosen([busy]) == [busy]  # nobody knows whose it is


def test_the_smallest_counts() -> None:
    small = with_one(memory_total_gib=40.0, nvlinks_active=None)
    assert smallest_memory_bytes(small.samples) == 40 * 2**30
    assert (fewest_links(GOOD.samples), fewest_links(small.samples)) == (18, 0)
    assert (smallest_memory_bytes(()), fewest_links(())) == (None, None)
