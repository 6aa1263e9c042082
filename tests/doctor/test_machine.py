from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from refocused.doctor.machine import (
    EARLIEST_SECONDS,
    Machine,
    Packages,
    judge_clock,
    judge_compilers,
    judge_machine,
    judge_operators,
    judge_packages,
    probe_compilers,
    probe_machine,
    probe_packages,
)
from refocused.monitor.sampler.machine_readings import Memory

PACKAGES = Packages(
    python=(3, 12, 1),
    installed={"torch": "2.13.0+cu130", "deepspeed": "0.19.8", "transformers": "5.23.0"},
    required=("torch>=2.11", "deepspeed>=0.19.8,<0.20"),
    pinned={"torch": "2.13.0", "transformers": "5.23.0"},
)
MACHINE = Machine(16, Memory(10**12, 10**11, swap_used=0), 10**10, (20_000, 20_000))
NOW = EARLIEST_SECONDS + 1e6


def test_probes_of_this_machine() -> None:
    packages, machine = probe_packages(), probe_machine()
    assert all(packages.installed[name] for name in ("torch", "deepspeed", "pydantic", "packaging"))
    assert not any("extra" in text for text in packages.required)
    assert set(probe_compilers()) <= {"C", "C++", "CUDA", "ninja", "Triton"}
    assert machine.cores >= 1 and machine.memory.available > 0


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({}, "ok", "Python 3.12.1, torch 2.13.0+cu130, deepspeed 0.19.8, transformers 5.23.0"),
        ({"pinned": {}}, "ok", "torch 2.13.0+cu130"),
        ({"python": (3, 10, 9)}, "fail", "3.10.9"),
        ({"torch": None}, "fail", "missing: torch"),
        ({"deepspeed": "0.20.1"}, "fail", "deepspeed 0.20.1 (<0.20,>=0.19.8 is needed)"),
        ({"transformers": "5.24.0"}, "warn", "transformers 5.24.0 (5.23.0)"),
    ],
)
def test_packages(change: dict[str, Any], level: str, words: str) -> None:
    versions = {name: found for name, found in change.items() if name in PACKAGES.installed}
    facts = {"installed": {**PACKAGES.installed, **versions}} if versions else change
    first, *_ = judge_packages(dataclasses.replace(PACKAGES, **facts))
    assert (first.level, first.fix is None) == (level, level == "ok")
    assert words in first.text


@pytest.mark.parametrize(
    ("there", "device", "compiles", "level", "words"),
    [
        ("C C++ Triton", "cuda", "auto", "ok", "C, C++; the blocks can be compiled"),
        ("", "cpu", "auto", "ok", "none; this run compiles nothing"),
        ("C++ Triton", "cuda", "off", "ok", "this run compiles nothing"),
        ("C++ Triton", "cuda", "auto", "warn", "without a C compiler: steps take longer"),
        ("C++", "cuda", "on", "fail", "a C compiler and Triton"),
        ("C Triton", "cuda", "on", "ok", "can be compiled"),
        ("C", "cpu", "on", "fail", "needs a C++ compiler, which"),
    ],
)
def test_compilers(there: str, device: Any, compiles: Any, level: str, words: str) -> None:
    finding = judge_compilers(there.split(), device=device, compiles=compiles)
    assert (finding.level, finding.fix is None) == (level, level == "ok")
    assert words in finding.text


def test_only_an_offload_to_nvme_needs_an_operator() -> None:
    assert judge_operators(uses_nvme=False, missing=None).level == "ok"
    assert "async_io" in judge_operators(uses_nvme=True, missing=None).text
    finding = judge_operators(uses_nvme=True, missing="no libaio")
    assert (finding.level, "no libaio" in finding.text) == ("fail", True)


@pytest.mark.parametrize(
    ("change", "device", "check", "level", "words"),
    [
        ({}, "cuda", "machine", "ok", "16 cores, 100.0 GB"),
        ({"cores": 4}, "cuda", "machine", "warn", "8 ranks share the cores"),
        ({"shm_bytes": 64 * 10**6}, "cuda", "shm", "warn", "64 MB"),
        ({"shm_bytes": 0}, "cuda", "shm", "fail", "NCCL"),
        ({"shm_bytes": 0}, "cpu", "shm", None, ""),
        ({"open_files": (256, 9999)}, "cpu", "limits", "warn", "256 files"),
        ({"open_files": (256, 4096)}, "cpu", "limits", "warn", "ulimit -n 4096,"),
        ({"open_files": (-1, -1)}, "cpu", "limits", "ok", "any number"),
    ],
)
def test_machine(
    change: dict[str, Any], device: Any, check: str, level: str | None, words: str
) -> None:
    found = dataclasses.replace(MACHINE, **change)
    findings = {one.check: one for one in judge_machine(found, ranks=8, device=device)}
    if level is None:
        assert check not in findings
        return
    finding = findings[check]
    assert (finding.level, finding.fix is None) == (level, level == "ok")
    assert words in f"{finding.text} {finding.fix}"


@pytest.mark.parametrize(
    ("now", "ahead", "signs", "level"),
    [
        (NOW, 1.0, True, "ok"),
        (NOW, -30.0, True, "warn"),
        (NOW, 600.0, True, "fail"),
        (NOW, None, True, "warn"),
        (NOW, None, False, "ok"),
        (1000.0, None, False, "fail"),  # never set
    ],
)
def test_clock(now: float, ahead: float | None, signs: bool, level: str) -> None:
    store = None if ahead is None else now - ahead
    assert judge_clock(now_s=now, store_s=store, signs=signs).level == level
