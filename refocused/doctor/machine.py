"""Check packages, compilers, memory, limits, the clock, and the GPUs of the machine."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

from refocused.bucket.partial_files import free_bytes
from refocused.doctor.finding import Finding, Level
from refocused.estimate.memory_plan import Device
from refocused.monitor.readings import GpuSample
from refocused.monitor.sampler.alarms import alarm_rules, gpu_readings
from refocused.system.errors import RefocusedError, counted
from refocused.system.hardware import FreeMemory
from refocused.system.number_text import size_text

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


def judge_packages(packages: Packages) -> Finding:
    """Compare the installed versions with the required and the tested ones."""
    missing = [name for name, version in packages.installed.items() if version is None]
    there = {name: version for name, version in packages.installed.items() if version is not None}
    unfit = [
        f"{requirement.name} {there[requirement.name]} (needs {requirement.specifier})"
        for requirement in map(Requirement, packages.required)
        if requirement.name in there
        and not requirement.specifier.contains(there[requirement.name], prereleases=True)
    ]
    other = [
        f"{name} {there[name]} ({pin})"
        for name, pin in packages.pinned.items()
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
    text = f"{counted(cores, 'core')}, {size_text(memory.available)} of free memory"
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


BUSY_GB = 2.0  # more than a driver and a screen hold


@dataclasses.dataclass(frozen=True, slots=True)
class Gpus:
    """What NVIDIA's library and torch report; None: unknown.

    `samples` holds the GPUs of the run, or all GPUs if that is unknown. If it is empty, `note` says
    why; `is_fault` means that a driver does not answer. `driver_cuda` is the newest CUDA version
    that the driver supports, `capability` the lowest of the GPUs.
    """

    samples: tuple[GpuSample, ...] = ()
    note: str | None = None
    is_fault: bool = False
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    torch_cuda: str | None = None
    torch_count: int = 0
    capability: tuple[int, int] | None = None


def probe_gpus(host: str, *, requested: int | None, environment: Mapping[str, str]) -> Gpus:
    """Query NVIDIA's library and torch for `requested` GPUs (None: all that torch sees)."""
    import torch

    from refocused.monitor.sampler import gpu_reader

    try:
        # First of all: if the driver hangs, torch would, too.
        known = dict(enumerate(gpu_reader.gpu_capabilities()))
    except RefocusedError as error:
        return Gpus(note=str(error), is_fault=True)
    gpus = Gpus(torch_cuda=torch.version.cuda, torch_count=torch.cuda.device_count())
    try:
        reader = gpu_reader.GpuReader(
            host=host,
            visible=environment.get("CUDA_VISIBLE_DEVICES"),
            cuda_order=environment.get("CUDA_DEVICE_ORDER"),
            ranks=requested or gpus.torch_count,
        )
    except gpu_reader.NoGpusError as error:
        return dataclasses.replace(gpus, note=str(error), is_fault=error.is_fault)
    with contextlib.closing(reader):
        driver, driver_cuda = gpu_reader.driver_versions()
        samples = tuple(chosen(reader.samples()))
    return dataclasses.replace(
        gpus,
        samples=samples,
        note=None if samples else "The driver lists no GPU.",
        is_fault=not samples,
        driver=driver,
        driver_cuda=driver_cuda,
        capability=min((pair for gpu in samples if (pair := known.get(gpu.index))), default=None),
    )


def chosen(samples: Sequence[GpuSample]) -> Sequence[GpuSample]:
    """Return the GPUs that ranks would have; all, where that is unknown."""
    return [gpu for gpu in samples if gpu.local_rank is not None] or samples


def judge_gpus(
    gpus: Gpus, *, requested: int | None, device: Literal["auto", "cuda", "cpu"]
) -> Iterator[Finding]:
    """Report what about the GPUs stops a run or slows it down; `device` is `run.device`."""
    samples = gpus.samples
    if device == "cpu":
        yield Finding("gpus", "ok", "not used (run.device=cpu)")
        return
    if not samples and gpus.is_fault:
        yield Finding("gpus", "fail", str(gpus.note))
        return
    if not samples and (device == "cuda" or requested is not None):
        fix = "Rent a machine with GPUs, or set run.device=cpu for a trial."
        text = "this machine has no NVIDIA driver, and the run needs GPUs"
        yield Finding("gpus", "fail", text, fix)
        return
    if not samples:
        text = "none: the run would train on the CPU, which is only for trials"
        yield Finding("gpus", "warn", text)
        return
    yield _count(gpus, requested)
    yield _torch(gpus, requested)
    bad = [
        reading for reading in gpu_readings(samples, is_training=False) if reading.level == "bad"
    ]
    for reading in bad:  # by the rules of the alarms
        rule = alarm_rules()[reading.alarm]
        level: Level = "fail" if rule.severity == "critical" else "warn"
        yield Finding("health", level, reading.text, rule.advice)
    for gpu in samples:
        if gpu.mig:
            text = f"GPU {gpu.index} is divided by MIG: a rank gets one slice of it"
            fix = "Turn MIG off (nvidia-smi -mig 0) if you rent the whole GPU."
            yield Finding("health", "warn", text, fix)
    if not bad:
        has_ecc = any(gpu.ecc_uncorrected is not None for gpu in samples)
        ecc = "no memory errors" if has_ecc else "ECC is off or not reported"
        degrees = [gpu.temperature_celsius for gpu in samples if gpu.temperature_celsius]
        heat = f", at most {max(degrees)} C" if degrees else ""
        yield Finding("health", "ok", f"{ecc}, no row to replace, none throttled{heat}")
    if busy := {gpu.index: gpu for gpu in samples if (gpu.memory_used_gb or 0.0) > BUSY_GB}:
        most = max(gpu.memory_used_gb or 0.0 for gpu in busy.values())
        pids = sorted({pid for gpu in busy.values() for pid in gpu.processes or ()})
        whose = f"process {_listed(pids)}" if pids else "processes that this container cannot see"
        text = f"up to {most:.1f} GB of GPU {_listed(busy)} are in use by {whose}"
        fix = "End them (see nvidia-smi), or select other GPUs with CUDA_VISIBLE_DEVICES."
        yield Finding("memory", "warn", text, fix)
    unlinked = [gpu.index for gpu in samples if not gpu.nvlinks_active and not gpu.lost]
    if len(samples) > 1 and unlinked:
        text = f"GPU {_listed(unlinked)} has no active NVLink: ZeRO communicates over PCIe"
        fix = "Use zero.stage=1, which communicates least, or GPUs with NVLink (SXM, HGX)."
        yield Finding("nvlink", "warn", text, fix)
    elif len(samples) > 1:  # one with some links down is an alarm
        yield Finding("nvlink", "ok", f"{fewest_links(samples)} links up on every GPU")


def _count(gpus: Gpus, requested: int | None) -> Finding:
    samples = gpus.samples
    kinds = sorted({gpu.name for gpu in samples if gpu.name is not None})
    first = max(samples, key=lambda gpu: not gpu.lost)
    memory = f", {first.memory_total_gb:.1f} GB" if first.memory_total_gb else ""
    cuda = f" (CUDA {'.'.join(map(str, gpus.driver_cuda))})" if gpus.driver_cuda else ""
    text = f"{len(samples)} x {first.name or 'unknown'}{memory}, driver {gpus.driver}{cuda}"
    if requested is not None and requested > len(samples):
        fix = f"Start with {len(samples)}, or ask for a machine with {requested}."
        return Finding("gpus", "fail", f"{requested} requested, found {text}", fix)
    if len(kinds) > 1:
        text = f"{len(samples)} of several kinds ({', '.join(kinds)}): the slowest sets the pace"
        return Finding("gpus", "warn", text, "Select one kind with CUDA_VISIBLE_DEVICES.")
    return Finding("gpus", "ok", text)


def _torch(gpus: Gpus, requested: int | None) -> Finding:
    built = gpus.torch_cuda
    if built is None:
        text = "torch is built without CUDA and cannot use the GPUs"
        fix = "Install torch's build for CUDA; pip takes the build that its index offers."
        return Finding("torch", "fail", text, fix)
    if gpus.driver_cuda is not None and gpus.driver_cuda[0] < int(built.partition(".")[0]):
        newest = ".".join(map(str, gpus.driver_cuda))
        text = f"torch is built for CUDA {built}, but the driver supports up to {newest}"
        fix = "Install a newer driver, or torch for the driver's CUDA."
        return Finding("torch", "fail", text, fix)
    if gpus.torch_count < (requested or 1):
        text = f"torch sees {gpus.torch_count} of the {counted(len(gpus.samples), 'GPU')}"
        fix = "Check CUDA_VISIBLE_DEVICES and the error of torch.cuda.init()."
        return Finding("torch", "fail", text, fix)
    return Finding(
        "torch", "ok", f"built for CUDA {built}, sees {counted(gpus.torch_count, 'GPU')}"
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def smallest_memory_bytes(samples: Sequence[GpuSample]) -> float | None:
    """Return the memory of the smallest GPU; None: unknown."""
    known = [gpu.memory_total_gb for gpu in samples if gpu.memory_total_gb is not None]
    return min(known) * 1e9 if known else None


def fewest_links(samples: Sequence[GpuSample]) -> int | None:
    """Return the smallest number of active NVLinks of a GPU; None: no GPU answers."""
    return min((gpu.nvlinks_active or 0 for gpu in samples if not gpu.lost), default=None)


def judge_command(setting: str, command: str) -> Finding:
    """Report whether the shell can read a command, and has the program that it begins with.

    The command, which may hold a secret, is neither shown nor put into a process's arguments.
    """
    program = command.split()[0]
    of_program = ["sh", "-c", 'command -v "$1"', "sh", program]
    if _fails(["sh", "-n"], command):
        fix = f"Correct the quotes and operators of {setting}."
        return Finding("command", "fail", f"{setting}: sh cannot read the command", fix)
    if re.fullmatch(r"[\w./-]+", program) and _fails(of_program):
        fix = f"Install it, or change {setting}: a container often has no sudo or shutdown."
        return Finding("command", "fail", f"{setting}: {program} is not on this machine", fix)
    return Finding("command", "ok", f"{setting}: sh can read the command, which was not run")


def _fails(command: Sequence[str], given: str = "") -> bool:
    done = subprocess.run(command, input=given.encode(), capture_output=True, check=False)
    return done.returncode != 0
