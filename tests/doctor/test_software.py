from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from refocused.doctor.software import (
    Compilers,
    Packages,
    judge_compilers,
    judge_operators,
    judge_packages,
    probe_compilers,
    probe_packages,
)

GOOD = Packages(
    python=(3, 12, 1),
    installed={"torch": "2.13.0+cu130", "deepspeed": "0.19.8", "transformers": "5.23.0"},
    required=("torch>=2.11", "deepspeed>=0.19.8,<0.20"),
    pinned={"torch": "2.13.0", "transformers": "5.23.0"},
)
ALL = Compilers(c="/usr/bin/cc", cxx="/usr/bin/c++", nvcc=None, ninja=None, has_triton=True)


def test_what_is_installed_here_is_found() -> None:
    found = probe_packages()
    assert {"torch", "deepspeed", "packaging"} <= set(found.installed)
    assert all(found.installed[name] for name in ("torch", "deepspeed", "pydantic"))
    assert not any("extra" in text for text in found.required)
    assert isinstance(probe_compilers().has_triton, bool)


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({}, "ok", "Python 3.12.1, torch 2.13.0+cu130, deepspeed 0.19.8, transformers 5.23.0"),
        ({"pinned": {}}, "ok", "torch 2.13.0+cu130"),
        ({"python": (3, 10, 9)}, "fail", "3.10.9"),
        ({"installed": {**GOOD.installed, "torch": None}}, "fail", "missing: torch"),
        (
            {"installed": {**GOOD.installed, "deepspeed": "0.20.1"}},
            "fail",
            "deepspeed 0.20.1 (<0.20,>=0.19.8 is needed)",
        ),
        (
            {"installed": {**GOOD.installed, "transformers": "5.24.0"}},
            "warn",
            "transformers 5.24.0 (5.23.0)",
        ),
    ],
)
def test_packages(change: dict[str, object], level: str, words: str) -> None:
    findings = list(judge_packages(dataclasses.replace(GOOD, **change)))  # type: ignore[arg-type]
    assert findings[0].level == level
    assert words in findings[0].text
    assert (findings[0].fix is None) == (level == "ok")


@pytest.mark.parametrize(
    ("lacks", "device", "compiles", "level", "words"),
    [
        ({}, "cuda", "auto", "ok", "C, C++; the blocks can be compiled"),
        ({"c": None, "cxx": None}, "cpu", "auto", "ok", "none; this run compiles nothing"),
        ({"c": None}, "cuda", "off", "ok", "this run compiles nothing"),
        ({"c": None}, "cuda", "auto", "warn", "without a C compiler: steps take longer"),
        ({"c": None, "has_triton": False}, "cuda", "on", "fail", "a C compiler and Triton"),
        ({"cxx": None}, "cuda", "on", "ok", "can be compiled"),
        ({"cxx": None, "has_triton": False}, "cpu", "on", "fail", "needs a C++ compiler, which"),
    ],
)
def test_compilers(
    lacks: dict[str, object],
    device: Literal["cuda", "cpu"],
    compiles: Literal["auto", "on", "off"],
    level: str,
    words: str,
) -> None:
    found = dataclasses.replace(ALL, **lacks)  # type: ignore[arg-type]
    finding = judge_compilers(found, device=device, compiles=compiles)
    assert (finding.level, finding.fix is None) == (level, level == "ok")
    assert words in finding.text


def test_only_an_offload_to_nvme_needs_an_operator() -> None:
    assert judge_operators(uses_nvme=False, missing=None).level == "ok"
    assert "async_io" in judge_operators(uses_nvme=True, missing=None).text
    finding = judge_operators(uses_nvme=True, missing="no libaio")
    assert (finding.level, "no libaio" in finding.text) == ("fail", True)
