"""A machine with GPUs that a test describes: the real pynvml over a compiled stand-in library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml_stand_in.c")
VARIABLE = "STAND_IN_NVML"
GIB = 2**30
# An H100 at work, in NVML's units; field_N is NVML's field of that number.
HEALTHY = {
    "name": "NVIDIA H100 80GB HBM3",
    "utilization": 97,
    "memory_total": 80 * GIB,
    "memory_used": 48 * GIB,
    "temperature": 61,
    "slowdown": 87,
    "power": 640_500,
    "power_limit": 700_000,
    "sm_clock": 1755,
    "sm_clock_max": 1980,
    "memory_clock": 2619,
    "memory_clock_max": 2619,
    "clock_events": "0x4",
    "ecc_corrected": 0,
    "ecc_uncorrected": 0,
    "remapped_corrected": 0,
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_replays": 0,
    "mig": 0,
    "process": f"4711 {47 * GIB}",
    "field_82": 70,  # temperature of the memory
    "field_91": 18,  # NVLinks
    "field_165": 1,  # each of them is up
    "field_38": 0,
    "field_45": 0,
    "field_52": 0,
    "field_59": 0,
    "field_138": 0,  # KiB sent
    "field_139": 0,  # KiB received
}


def build_stand_in(folder: Path) -> Path:
    """Compile the library into a folder of its own; return its file."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc, for the stand-in of NVIDIA's library")
    library = folder / "libnvidia-ml.so.1"
    options = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *options, "-o", library, SOURCE], check=True)
    return library


class Machine:
    """Writes the file that the library answers from."""

    def __init__(self, file: Path, *, gpus: int) -> None:
        """Begin with healthy GPUs, alike but for their UUIDs."""
        self._file = file
        self._machine: dict[str, object] = {"gpus": gpus}
        self._gpus: list[dict[str, object]] = [{"uuid": uuid(index)} for index in range(gpus)]
        self._write()

    @property
    def environment(self) -> dict[str, str]:
        """What makes the library answer from this machine's file."""
        return {VARIABLE: str(self._file)}

    def driver(self, **facts: object) -> None:
        """Change what the whole machine answers."""
        self._machine |= facts
        self._write()

    def gpu(self, index: int, **facts: object) -> None:
        """Change what a GPU answers; None: that it does not support it."""
        self._gpus[index] |= facts
        self._write()

    def _write(self) -> None:
        lines = [f"{name} {value}" for name, value in self._machine.items()]
        for index, own in enumerate(self._gpus):
            facts = HEALTHY | own
            lines += [f"{index} {name} {fact}" for name, fact in facts.items() if fact is not None]
        temporary = self._file.with_suffix(".new")
        temporary.write_text("\n".join(lines) + "\n")
        temporary.replace(self._file)  # another inode at each change


def uuid(index: int) -> str:
    """Return the UUID of a GPU of the machine."""
    return f"GPU-{index}c0ffee0-0000-4000-8000-00000000000{index}"
