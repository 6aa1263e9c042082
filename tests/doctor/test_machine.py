"""What the doctor says of packages, compilers, the machine and its clock."""

import importlib.util
import os
import resource
import shutil
from typing import Any

import pytest

from refocused.doctor import machine
from refocused.doctor.machine import (
    EARLIEST_SECONDS,
    Packages,
    check_compilers,
    check_machine,
    judge_clock,
    judge_packages,
    probe_packages,
)
from refocused.monitor.sampler.machine_readings import FreeMemory

PACKAGES = Packages(
    installed={"torch": "2.13.0+cu130", "deepspeed": "0.19.8", "transformers": "5.23.0"},
    required=("torch>=2.11", "deepspeed>=0.19.8,<0.20"),
    pinned={"torch": "2.13.0", "transformers": "5.23.0"},
)
NOW = EARLIEST_SECONDS + 1e6


def test_the_packages_of_this_machine() -> None:
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
def test_packages(versions: dict[str, Any], level: str, words: str) -> None:
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
def test_compilers(
    monkeypatch: pytest.MonkeyPatch, there: str, device: Any, compiles: Any, level: str, words: str
) -> None:
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
def test_machine(
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    device: Any,
    check: str,
    level: str | None,
    words: str,
) -> None:
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
def test_clock(now: float, ahead: float | None, signs: bool, level: str) -> None:
    store = None if ahead is None else now - ahead
    assert judge_clock(now_s=now, store_s=store, signs=signs).level == level
