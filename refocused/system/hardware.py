"""Facts of GPUs by their names, and the processor's flags; an unknown GPU has no facts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from refocused.system.errors import ConfigError

CPU_INFO = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True, slots=True)
class GpuFacts:
    """What the maker's data sheet says of one GPU."""

    name: str  # short name
    bf16_flops: float  # dense bf16 products with float32 sums; sheets print twice this (sparse)
    memory_gib: float  # as the driver reports it
    memory_bytes_per_second: float
    # To the other GPUs of the machine, each way: NVLink's where it is on board, else PCIe's.
    link_bytes_per_second: float
    host_bytes_per_second: float  # each way: PCIe's


_FACTS = (
    GpuFacts("A100 40GB", 312e12, 40.0, 1.555e12, 300e9, 32e9),
    GpuFacts("A100 80GB", 312e12, 80.0, 2.039e12, 300e9, 32e9),
    GpuFacts("B200", 2250e12, 179.1, 8e12, 900e9, 64e9),
    GpuFacts("H100 NVL", 835.5e12, 93.6, 3.9e12, 64e9, 64e9),
    GpuFacts("H100 PCIe", 756.5e12, 79.6, 2e12, 64e9, 64e9),
    GpuFacts("H100 SXM", 989.4e12, 79.6, 3.35e12, 450e9, 64e9),
    GpuFacts("H200", 989.4e12, 140.4, 4.8e12, 450e9, 64e9),
    GpuFacts("L4", 121e12, 22.5, 300e9, 32e9, 32e9),
    GpuFacts("L40S", 362.05e12, 45.0, 864e9, 32e9, 32e9),
    GpuFacts("RTX 4090", 165.2e12, 24.0, 1.008e12, 32e9, 32e9),
)

# What most clouds rent out under the name of the family.
_USUAL = ("A100 80GB", "H100 SXM")

# Names as the driver gives them, where they are not the short name behind the maker's.
_DRIVER_NAMES = {
    "A100-SXM4-40GB": "A100 40GB",
    "A100-PCIE-40GB": "A100 40GB",
    "A100-SXM4-80GB": "A100 80GB",
    "A100 80GB PCIe": "A100 80GB",
    "H100 80GB HBM3": "H100 SXM",
    "GeForce RTX 4090": "RTX 4090",
}


def gpu_facts(name: str) -> GpuFacts | None:
    """Return the facts of a GPU by its name from the driver, or its short one; None: unknown.

    Case, spaces and dashes do not matter. The whole name must be known: a slice of a GPU
    (`... MIG 1g.10gb`) or a laptop's is another GPU.
    """
    return _BY_KEY.get(_key(name))


def named_gpu(name: str) -> GpuFacts:
    """Return the facts of the GPU that `--gpu` names, also by first words (`H100`: `H100 SXM`).

    Raises:
        ConfigError: The GPU is unknown.
    """
    facts = gpu_facts(name)
    if facts is not None:
        return facts
    words = name.lower().removeprefix("nvidia").replace("-", " ").split()
    fitting = [one for one in _FACTS if words and one.name.lower().split()[: len(words)] == words]
    chosen = [one for one in fitting if one.name in _USUAL] or fitting
    if len(chosen) == 1:
        return chosen[0]
    raise ConfigError(
        f"--gpu {name!r} is not a known GPU. "
        f"Choose one of: {', '.join(facts.name for facts in _FACTS)}."
    )


def cpu_flags() -> frozenset[str]:
    """Return the instruction sets that the kernel lists for this machine's first processor."""
    try:
        text = CPU_INFO.read_text()
    except OSError:
        return frozenset()
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(flags[1].split()) if flags else frozenset()


def _key(name: str) -> str:
    return name.lower().removeprefix("nvidia").replace(" ", "").replace("-", "")


_BY_KEY = {_key(facts.name): facts for facts in _FACTS}
_BY_KEY |= {_key(driver): _BY_KEY[_key(short)] for driver, short in _DRIVER_NAMES.items()}
