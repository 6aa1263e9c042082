"""Python, the packages, and what compiles for them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from refocused.doctor.finding import Finding

OLDEST_PYTHON = (3, 11)
SHOWN = ("torch", "deepspeed", "transformers")
PINS = Path(__file__).resolve().parents[2] / "requirements_training.txt"
INSTALL = "./launch/setup_environment.sh installs what was run together."


@dataclasses.dataclass(frozen=True, slots=True)
class Packages:
    """What is installed, and what should be.

    Attributes:
        python: Version.
        installed: Version of each package that is asked for; None: it is missing.
        required: What this package asks for (`torch>=2.11`).
        pinned: The versions that were run together; empty where that list is not here.
    """

    python: tuple[int, int, int]
    installed: Mapping[str, str | None]
    required: tuple[str, ...]
    pinned: Mapping[str, str]

    @property
    def missing(self) -> list[str]:
        """Names of those that are not there at all."""
        return [name for name, version in self.installed.items() if version is None]


@dataclasses.dataclass(frozen=True, slots=True)
class Compilers:
    """What compiles.

    Attributes:
        c: Path of the C compiler; None: there is none.
        cxx: Of the C++ compiler.
        nvcc: Of CUDA's.
        ninja: Of ninja.
        has_triton: Whether Triton can be imported.
    """

    c: str | None
    cxx: str | None
    nvcc: str | None
    ninja: str | None
    has_triton: bool


def probe_packages() -> Packages:
    """Ask for the versions of everything that this package needs."""
    required = tuple(text for text in _required() if Requirement(text).marker is None)
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", _text(PINS), re.MULTILINE))
    names = {"refocused", *(Requirement(text).name for text in required), *pinned}
    return Packages(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        installed={name: _version(name) for name in sorted(names)},
        required=required,
        pinned=pinned,
    )


def probe_compilers() -> Compilers:
    """Look for compilers on the path."""
    return Compilers(
        c=_first("cc", "gcc", "clang"),
        cxx=_first("c++", "g++", "clang++"),
        nvcc=_first("nvcc"),
        ninja=_first("ninja") or _beside_python("ninja"),
        has_triton=importlib.util.find_spec("triton") is not None,
    )


def judge_packages(found: Packages) -> Iterator[Finding]:
    """Compare what is installed with what is asked for, and with what was run together."""
    python = ".".join(str(part) for part in found.python)
    if found.python < OLDEST_PYTHON:
        oldest = ".".join(str(part) for part in OLDEST_PYTHON)
        yield Finding("python", "fail", f"{python}", f"Python {oldest} or newer is needed.")
    missing = found.missing
    unfit = [
        f"{one.name} {version} ({one.specifier} is needed)"
        for one in map(Requirement, found.required)
        if (version := found.installed.get(one.name)) is not None
        and not one.specifier.contains(version, prereleases=True)
    ]
    other = [
        f"{name} {version} ({pin})"
        for name, pin in found.pinned.items()
        if (version := found.installed.get(name)) is not None and version.partition("+")[0] != pin
    ]
    if missing:
        yield Finding("packages", "fail", f"missing: {', '.join(missing)}", INSTALL)
    if unfit:
        yield Finding(
            "packages", "fail", f"of a version that does not fit: {_some(unfit)}", INSTALL
        )
    elif other:
        text = f"other versions than those that were run together: {_some(other)}"
        yield Finding("packages", "warn", text, INSTALL)
    if not (missing or unfit or other):
        shown = ", ".join(f"{name} {found.installed[name]}" for name in SHOWN)
        yield Finding("packages", "ok", f"Python {python}, {shown}")


def judge_compilers(
    found: Compilers, *, device: Literal["cuda", "cpu"], compiles: Literal["auto", "on", "off"]
) -> Finding:
    """Say what the compilers that are there are good for.

    Args:
        found: What is there.
        device: What the run computes on.
        compiles: `model.compile`.
    """
    names = ("C", found.c), ("C++", found.cxx), ("CUDA", found.nvcc), ("ninja", found.ninja)
    there = ", ".join(name for name, path in names if path) or "none"
    if compiles == "off" or (compiles == "auto" and device == "cpu"):
        return Finding("compilers", "ok", f"{there}; this run compiles nothing")
    lacks = [] if found.c else ["a C compiler"]
    if device == "cpu" and not found.cxx:
        lacks.append("a C++ compiler")
    if device == "cuda" and not found.has_triton:
        lacks.append("Triton")
    if not lacks:
        return Finding("compilers", "ok", f"{there}; the blocks can be compiled")
    fix = "Install them (apt-get install build-essential; Triton comes with torch for CUDA)"
    if compiles == "on":
        text = f"model.compile=on needs {' and '.join(lacks)}, which this machine lacks"
        return Finding("compilers", "fail", text, f"{fix}, or set model.compile=off.")
    text = f"the blocks cannot be compiled without {' and '.join(lacks)}: steps take longer"
    return Finding("compilers", "warn", text, f"{fix}.")


def judge_operators(*, uses_nvme: bool, missing: str | None) -> Finding:
    """Say whether what DeepSpeed has to build can be built.

    Args:
        uses_nvme: Whether the run offloads to an NVMe drive.
        missing: Why DeepSpeed's asynchronous files cannot be used here; None: they can.
    """
    if not uses_nvme:
        return Finding("ops", "ok", "none has to be built (AdamW and Muon are torch's)")
    if missing is None:
        return Finding("ops", "ok", "DeepSpeed's async_io, for the offload to NVMe, can be built")
    return Finding(
        "ops",
        "fail",
        f"the offload to NVMe needs DeepSpeed's async_io: {missing}",
        "Install libaio-dev, g++ and ninja, or offload to cpu.",
    )


def _some(texts: list[str], most: int = 4) -> str:
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def _required() -> list[str]:
    """Return what this package asks for; nothing where it was not installed itself."""
    try:
        return importlib.metadata.requires("refocused") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


def _beside_python(name: str) -> str | None:
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else None


def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""
