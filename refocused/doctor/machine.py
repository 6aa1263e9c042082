"""Check packages, compilers, memory, limits and the clock of the machine."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

from refocused.bucket.partial_files import free_bytes
from refocused.doctor.finding import Finding, size
from refocused.estimate.memory_plan import Device
from refocused.monitor.sampler.machine_readings import FreeMemory
from refocused.system.errors import counted

SHOWN = ("torch", "deepspeed", "transformers")
PINS = Path(__file__).resolve().parents[2] / "requirements_training.txt"
INSTALL = "./launch/setup_environment.sh installs the tested versions."
if not PINS.is_file():  # not a checkout
    INSTALL = "Install refocused again with its dependencies, without pip's --no-deps."
NAMED_PACKAGES = 4
COMPILERS = {  # the commands to look for, in this order
    "C": ("cc", "gcc", "clang"),
    "C++": ("c++", "g++", "clang++"),
    "CUDA": ("nvcc",),
    "ninja": ("ninja", str(Path(sys.executable).with_name("ninja"))),
}
FEWEST_FILES = 1024
# NCCL passes data between the processes of a machine through /dev/shm; Docker's 64 MB are too few.
SHM, LEAST_SHM_BYTES = Path("/dev/shm"), 2**30
# Google refuses the tokens of a key if the clocks differ by some minutes.
REFUSED_SKEW_SECONDS = 240.0
NOTICED_SKEW_SECONDS = 5.0
EARLIEST_SECONDS = 1_735_689_600.0  # 2025: an earlier clock was never set


class Packages(NamedTuple):
    """Installed versions (None: missing), requirements of this package, and pinned versions."""

    installed: Mapping[str, str | None]
    required: tuple[str, ...]
    pinned: Mapping[str, str]


def probe_packages() -> Packages:
    """Look up the versions of all packages that this package needs, and of the others there are."""
    required: list[str] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # not installed itself
        required = importlib.metadata.requires("refocused") or []
    required = [text for text in required if Requirement(text).marker is None]
    pins = PINS.read_text() if PINS.is_file() else ""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", pins, re.MULTILINE))
    installed = dict.fromkeys(Requirement(text).name for text in required)
    for name in sorted({*installed, *pinned}):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return Packages(installed, tuple(required), pinned)


def judge_packages(found: Packages) -> Finding:
    """Compare the installed versions with the required and the tested ones."""
    missing = [name for name, version in found.installed.items() if version is None]
    there = {name: version for name, version in found.installed.items() if version is not None}
    unfit = [
        f"{one.name} {there[one.name]} (needs {one.specifier})"
        for one in map(Requirement, found.required)
        if one.name in there and not one.specifier.contains(there[one.name], prereleases=True)
    ]
    other = [
        f"{name} {there[name]} ({pin})"
        for name, pin in found.pinned.items()
        if name in there and there[name].partition("+")[0] != pin
    ]
    if missing:
        return Finding("packages", "fail", f"missing: {', '.join(missing)}", INSTALL)
    if unfit:
        text = f"unsupported versions: {_first_of(unfit)}"
        return Finding("packages", "fail", text, INSTALL)
    if other:
        text = f"versions other than the tested ones: {_first_of(other)}"
        return Finding("packages", "warn", text, INSTALL)
    shown = ", ".join(f"{name} {there[name]}" for name in SHOWN)
    return Finding("packages", "ok", f"Python {platform.python_version()}, {shown}")


def _first_of(texts: list[str]) -> str:
    rest = len(texts) - NAMED_PACKAGES
    return ", ".join(texts[:NAMED_PACKAGES]) + (f" and {rest} more" if rest > 0 else "")


def check_compilers(*, device: Device, compiles: Literal["auto", "on", "off"]) -> Finding:
    """Report whether the compilers suffice for `model.compile` (`compiles`)."""
    there = [name for name, commands in COMPILERS.items() if any(map(shutil.which, commands))]
    there += ["Triton"] * (importlib.util.find_spec("triton") is not None)
    shown = ", ".join(name for name in there if name != "Triton") or "none"
    if compiles == "off" or (compiles == "auto" and device == "cpu"):
        return Finding("compilers", "ok", f"{shown}; this run compiles nothing")
    needs = {"C": "a C compiler"} | (
        {"C++": "a C++ compiler"} if device == "cpu" else {"Triton": "Triton"}
    )
    lacks = " and ".join(what for name, what in needs.items() if name not in there)
    if not lacks:
        return Finding("compilers", "ok", f"{shown}; the blocks can be compiled")
    fix = "Install them (apt-get install build-essential; Triton comes with torch for CUDA)"
    if compiles == "on":
        text = f"model.compile=on needs {lacks}, which this machine lacks"
        return Finding("compilers", "fail", text, f"{fix}, or set model.compile=off.")
    text = f"the blocks cannot be compiled without {lacks}: steps take longer"
    return Finding("compilers", "warn", text, f"{fix}.")


def check_async_io(device: Device) -> Finding:
    """Report whether DeepSpeed's operator for offloads to NVMe can be built."""
    from refocused.engine.build_engine import why_no_async_io

    missing = why_no_async_io(device)
    if missing is None:
        return Finding("ops", "ok", "DeepSpeed's async_io, for offloads to NVMe, can be built")
    text = f"the offload to NVMe needs DeepSpeed's async_io: {missing}"
    return Finding("ops", "fail", text, "Install libaio-dev, g++ and ninja, or offload to cpu.")


def check_machine(memory: FreeMemory, *, ranks: int, device: Device) -> Iterator[Finding]:
    """Report what this machine or container has too little of for the ranks."""
    cores = len(os.sched_getaffinity(0))
    text = f"{counted(cores, 'core')}, {size(memory.available)} of free memory"
    if cores < ranks:
        text = f"{text}: {ranks} ranks share the cores, so the GPUs wait for the CPU"
        yield Finding("machine", "warn", text, "Use a machine with more cores.")
    else:
        yield Finding("machine", "ok", text)
    shm_bytes = free_bytes(SHM) if SHM.is_dir() else 0
    if device == "cuda" and ranks > 1 and shm_bytes < LEAST_SHM_BYTES:
        text = f"/dev/shm, which NCCL uses between GPUs, has {shm_bytes / 1e6:.0f} MB free"
        fix = "Start the container with --ipc=host or --shm-size=8g."
        yield Finding("shm", "warn" if shm_bytes else "fail", text, fix)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEWEST_FILES:
        most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        text = f"a process may open {soft:,} files, and a rank uses up to {FEWEST_FILES:,}"
        fix = f"Run in the shell that starts training: ulimit -n {most}"
        yield Finding("limits", "warn", text, fix)
    else:
        shown = "any number of" if soft == resource.RLIM_INFINITY else f"{soft:,}"
        yield Finding("limits", "ok", f"{shown} open files a process")


def judge_clock(*, now_s: float, store_s: float | None, signs: bool) -> Finding:
    """Compare this machine's clock with the store's (None: no answer), in seconds since 1970.

    `signs`: the run uses a store that checks the time.
    """
    fix = "Set it: timedatectl set-ntp true (or chronyc makestep)."
    here = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if now_s < EARLIEST_SECONDS:
        return Finding("clock", "fail", f"it shows {here}, which is in the past", fix)
    if not signs:
        return Finding("clock", "ok", here)
    if store_s is None:
        text = f"{here}; the store did not answer with its time"
        return Finding("clock", "warn", text, "Check that storage.googleapis.com can be reached.")
    skew = now_s - store_s
    text = f"{abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} the store's ({here} here)"
    if abs(skew) > REFUSED_SKEW_SECONDS:
        return Finding("clock", "fail", f"{text}: signed requests are refused", fix)
    if abs(skew) > NOTICED_SKEW_SECONDS:
        return Finding("clock", "warn", text, fix)
    return Finding("clock", "ok", f"{here}, the same as the store's")
