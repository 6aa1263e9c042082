"""What the doctor says of packages, compilers, the machine, its clock and its GPUs."""

import dataclasses
import importlib.util
import os
import resource
import shutil

import pytest

from refocused.doctor import machine
from refocused.doctor.machine import (
    EARLIEST_SECONDS,
    Gpus,
    Packages,
    check_compilers,
    check_machine,
    chosen,
    fewest_links,
    judge_clock,
    judge_gpus,
    judge_packages,
    probe_packages,
    smallest_memory_bytes,
)
from refocused.monitor.readings import GpuSample
from refocused.system.hardware import FreeMemory

PACKAGES = Packages(
    installed={"torch": "2.13.0+cu130", "deepspeed": "0.19.8", "transformers": "5.23.0"},
    required=("torch>=2.11", "deepspeed>=0.19.8,<0.20"),
    pinned={"torch": "2.13.0", "transformers": "5.23.0"},
)
NOW = EARLIEST_SECONDS + 1e6


def test_the_packages_of_this_machine():
    packages = probe_packages()
    assert all(packages.installed[name] for name in ("torch", "deepspeed", "pydantic", "packaging"))
    assert not any("extra" in text for text in packages.required)


@pytest.mark.parametrize(
    ("versions", "level", "words"),
    [
        ({}, "ok", "torch 2.13.0+cu130, deepspeed 0.19.8, transformers 5.23.0"),
        ({"torch": None}, "fail", "missing: torch"),
        ({"deepspeed": "0.20.1"}, "fail", "deepspeed 0.20.1 (needs <0.20,>=0.19.8)"),
        ({"transformers": "5.24.0"}, "warn", "transformers 5.24.0 (5.23.0)"),
    ],
)
def test_packages(versions, level, words):
    found = judge_packages(PACKAGES._replace(installed={**PACKAGES.installed, **versions}))
    assert (found.level, found.fix is None) == (level, level == "ok")
    assert words in found.text


@pytest.mark.parametrize(
    ("there", "device", "compiles", "level", "words"),
    [
        ("cc c++ triton", "cuda", "auto", "ok", "C, C++; the blocks can be compiled"),
        ("", "cpu", "auto", "ok", "none; this run compiles nothing"),
        ("c++ triton", "cuda", "off", "ok", "this run compiles nothing"),
        ("g++ triton", "cuda", "auto", "warn", "without a C compiler: steps take longer"),
        ("c++", "cuda", "on", "fail", "a C compiler and Triton"),
        ("gcc triton", "cuda", "on", "ok", "can be compiled"),
        ("cc", "cpu", "on", "fail", "needs a C++ compiler, which"),
    ],
)
def test_compilers(monkeypatch, there, device, compiles, level, words):
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there.split() else None)
    spec = object() if "triton" in there else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    finding = check_compilers(device=device, compiles=compiles)
    assert (finding.level, finding.fix is None) == (level, level == "ok")
    assert words in finding.text


@pytest.mark.parametrize(
    ("change", "device", "check", "level", "words"),
    [
        ({}, "cuda", "machine", "ok", "16 cores, 100.0 GB"),
        ({"cores": 4}, "cuda", "machine", "warn", "8 ranks share the cores"),
        ({"shm_bytes": 64 * 10**6}, "cuda", "shm", "warn", "64 MB"),
        ({"shm_bytes": 0}, "cuda", "shm", "fail", "NCCL"),
        ({"shm_bytes": 0}, "cpu", "shm", None, ""),
        ({"open_files": (256, 4096)}, "cpu", "limits", "warn", "256 files"),
        ({"open_files": (256, 4096)}, "cpu", "limits", "warn", "ulimit -n 4096"),
        ({"open_files": (-1, -1)}, "cpu", "limits", "ok", "any number"),
    ],
)
def test_machine(monkeypatch, change, device, check, level, words):
    facts = {"cores": 16, "shm_bytes": 10**10, "open_files": (20_000, 20_000), **change}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(facts["cores"]))
    monkeypatch.setattr(machine, "free_bytes", lambda _: facts["shm_bytes"])
    monkeypatch.setattr(resource, "getrlimit", lambda _: facts["open_files"])
    memory = FreeMemory(10**12, 10**11, swap_used=0)
    found = {one.check: one for one in check_machine(memory, ranks=8, device=device)}
    assert (check in found) == (level is not None)
    if level is not None:
        assert (found[check].level, found[check].fix is None) == (level, level == "ok")
        assert words in f"{found[check].text} {found[check].fix}"


@pytest.mark.parametrize(
    ("now", "ahead", "signs", "level"),
    [
        *((NOW, ahead, True, "ok") for ahead in (-5.0, 1.0, 5.0)),
        *((NOW, ahead, True, "warn") for ahead in (-240.0, -5.1, 5.1, 240.0)),
        *((NOW, ahead, True, "fail") for ahead in (-600.0, -241.0, 241.0, 600.0)),
        (NOW, None, True, "warn"),
        (NOW, None, False, "ok"),
        (1000.0, None, False, "fail"),  # never set
    ],
)
def test_clock(now, ahead, signs, level):
    store = None if ahead is None else now - ahead
    assert judge_clock(now_s=now, store_s=store, signs=signs).level == level


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


def with_one(**facts):
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
def test_what_is_there_and_what_is_wrong(facts, wanted, check, level, words):
    is_gpus = all(name in Gpus.__dataclass_fields__ for name in facts)
    found = dataclasses.replace(GOOD, **facts) if is_gpus else with_one(**facts)
    findings = list(judge_gpus(found, requested=wanted, device="auto"))
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
def test_a_machine_without_any(device, wanted, is_fault, level):
    found = Gpus(note="The NVIDIA driver does not answer.", is_fault=is_fault)
    (finding,) = judge_gpus(found, requested=wanted, device=device)
    assert finding.level == level


def test_what_a_driver_and_a_screen_hold_is_not_reported():
    findings = judge_gpus(with_one(memory_used_gb=2.0), requested=None, device="auto")
    assert {finding.level for finding in findings} == {"ok"}


def test_the_runs_own_gpus_count_and_of_them_the_smallest():
    busy = dataclasses.replace(HEALTHY, index=4, memory_used_gb=70.0)
    ours = [dataclasses.replace(HEALTHY, local_rank=0)]
    assert chosen([*ours, busy]) == ours
    assert chosen([busy]) == [busy]  # nobody knows whose it is
    small = with_one(memory_total_gb=40.0, nvlinks_active=None)
    assert smallest_memory_bytes(small.samples) == 40e9
    assert (fewest_links(GOOD.samples), fewest_links(small.samples)) == (18, 0)
    assert (smallest_memory_bytes(()), fewest_links(())) == (None, None)
