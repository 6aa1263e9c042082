"""Data-sheet figures of known GPUs, the processor's flags, and the memory that is free."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

from refocused.system.errors import ConfigError

CPU_INFO = Path("/proc/cpuinfo")
_PROC, _CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# The files of a control group's limit and usage, in version 2 and 1.
_VERSION_2 = ("memory.max", "memory.current")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
BF16_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}  # by the processor's flag


@dataclasses.dataclass(frozen=True, slots=True)
class GpuSpec:
    """Figures of one GPU's data sheet; bandwidths are per direction."""

    name: str  # short name
    bf16_flops: float  # per second, dense with float32 accumulation; sheets print the sparse double
    memory_gib: float  # as the driver reports it
    memory_bytes_per_second: float
    link_bytes_per_second: float  # to other GPUs of the machine: NVLink where present, else PCIe
    host_bytes_per_second: float  # PCIe


_FACTS = (
    GpuSpec("A100 40GB", 312e12, 40.0, 1.555e12, 300e9, 32e9),
    GpuSpec("A100 80GB", 312e12, 80.0, 2.039e12, 300e9, 32e9),
    GpuSpec("B200", 2250e12, 179.1, 8e12, 900e9, 64e9),
    GpuSpec("H100 NVL", 835.5e12, 93.6, 3.9e12, 64e9, 64e9),
    GpuSpec("H100 PCIe", 756.5e12, 79.6, 2e12, 64e9, 64e9),
    GpuSpec("H100 SXM", 989.4e12, 79.6, 3.35e12, 450e9, 64e9),
    GpuSpec("H200", 989.4e12, 140.4, 4.8e12, 450e9, 64e9),
    GpuSpec("L4", 121e12, 22.5, 300e9, 32e9, 32e9),
    GpuSpec("L40S", 362.05e12, 45.0, 864e9, 32e9, 32e9),
    GpuSpec("RTX 4090", 165.2e12, 24.0, 1.008e12, 32e9, 32e9),
)

# The variant that most clouds rent out under the family's name.
_DEFAULT_VARIANTS = ("A100 80GB", "H100 SXM")

# The driver's names (less "NVIDIA") where they differ from the short name.
_DRIVER_NAMES = {
    "A100-SXM4-40GB": "A100 40GB",
    "A100-PCIE-40GB": "A100 40GB",
    "A100-SXM4-80GB": "A100 80GB",
    "A100 80GB PCIe": "A100 80GB",
    "H100 80GB HBM3": "H100 SXM",
    "GeForce RTX 4090": "RTX 4090",
}


def cpu_name() -> str:
    """Return the processor's name and its cores; `CPU` where the kernel does not name it."""
    with contextlib.suppress(OSError):
        named = re.search(r"(?m)^model name\s*:\s*(.+)", CPU_INFO.read_text(errors="replace"))
        if named is not None:
            return f"{named[1].strip()} ({os.cpu_count()} cores)"
    return "CPU"


def gpu_spec(name: str) -> GpuSpec | None:
    """Return the facts of a GPU by its driver name or short name, or None if it is unknown.

    Case, spaces and dashes are ignored. The whole name must match: a MIG slice
    (`... MIG 1g.10gb`) or a laptop variant is a different GPU.
    """
    return _BY_KEY.get(_key(name))


def named_gpu(name: str, *, option: str = "--gpu") -> GpuSpec:
    """Return the facts of the GPU given by an option; leading words suffice (`H100`: `H100 SXM`).

    Raises `ConfigError` if the GPU is unknown.
    """
    facts = gpu_spec(name)
    if facts is not None:
        return facts
    words = name.lower().removeprefix("nvidia").replace("-", " ").split()
    matches = [gpu for gpu in _FACTS if words and gpu.name.lower().split()[: len(words)] == words]
    matches = [gpu for gpu in matches if gpu.name in _DEFAULT_VARIANTS] or matches
    if len(matches) == 1:
        return matches[0]
    raise ConfigError(
        f"{option} {name!r} is not a known GPU. "
        f"Choose one of: {', '.join(facts.name for facts in _FACTS)}."
    )


def cpu_flags() -> frozenset[str]:
    """Return the kernel's flags of the first processor; empty where it lists none."""
    try:
        text = CPU_INFO.read_text()
    except OSError:
        return frozenset()
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(flags[1].split()) if flags else frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory in bytes."""

    total: int  # of the machine, or the container's limit if that is less
    available: int  # to processes, page cache included
    swap_used: int  # of the machine


def memory_now(proc: Path = _PROC, groups: Path = _CONTROL_GROUPS) -> FreeMemory:
    """Read the memory of the machine, or of the tightest control group around this process."""
    import psutil  # commands read this file without it

    machine, swap = psutil.virtual_memory(), psutil.swap_memory()
    memory = FreeMemory(machine.total, machine.available, swap.used)
    for folder, (limit, used) in _groups_around_us(proc, groups):
        try:
            most = (folder / limit).read_text().strip()
            if not most.isdecimal():  # `max` in version 2
                continue
            # Page cache counts against the limit, but is freed when memory is needed. Version 1
            # has that of the whole group as `total_...`.
            pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            kinds = {name.removeprefix("total_"): int(value) for name, value in pairs}
            cached = kinds.get("active_file", 0) + kinds.get("inactive_file", 0)
            taken = int((folder / used).read_text()) - cached
        except OSError:
            continue
        memory = dataclasses.replace(
            memory,
            total=min(memory.total, int(most)),
            available=min(memory.available, max(0, int(most) - taken)),
        )
    return memory


def _groups_around_us(proc: Path, groups: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yield the folder and files of each control group of this process, the outermost last.

    In a container the path may be the host's, with only the outermost folder visible.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    mounts = {"memory": (groups / "memory", _VERSION_1), "": (groups, _VERSION_2)}
    paths = {"memory": "/", "": "/"}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        paths |= {name: path for name in controllers.split(",") if name in mounts}
    for name, path in paths.items():
        mount, files = mounts[name]
        folder = mount / path.lstrip("/")
        for group in (folder, *folder.parents):
            yield group, files
            if group == mount:
                break


def _key(name: str) -> str:
    return name.lower().removeprefix("nvidia").replace(" ", "").replace("-", "")


_BY_KEY = {_key(facts.name): facts for facts in _FACTS}
_BY_KEY |= {_key(driver): _BY_KEY[_key(short)] for driver, short in _DRIVER_NAMES.items()}
