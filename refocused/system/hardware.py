"""Data-sheet figures of known GPUs, and the processor's flags."""

import dataclasses
import re
from pathlib import Path

from refocused.system.errors import ConfigError

CPU_INFO = Path("/proc/cpuinfo")
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


def _key(name: str) -> str:
    return name.lower().removeprefix("nvidia").replace(" ", "").replace("-", "")


_BY_KEY = {_key(facts.name): facts for facts in _FACTS}
_BY_KEY |= {_key(driver): _BY_KEY[_key(short)] for driver, short in _DRIVER_NAMES.items()}
