"""A machine with GPUs that a test describes: the real pynvml over a stand-in of its library."""

import ctypes
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml as nvml

VARIABLE = "STAND_IN_NVML"  # names the file of facts
GB = 10**9
# An H100 at work, in NVML's units; field_N is NVML's field of that number.
HEALTHY: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "utilization": 97,
    "memory_total": 80 * GB,
    "memory_used": 48 * GB,
    "temperature": 61,
    "slowdown": 87,
    "power": 640_500,
    "power_limit": 700_000,
    "sm_clock": 1755,
    "sm_clock_max": 1980,
    "memory_clock": 2619,
    "clock_events": 0x4,
    "ecc_corrected": 0,
    "ecc_uncorrected": 0,
    "remapped_corrected": 0,
    "remapped_uncorrected": 0,
    "remap_pending": 0,
    "remap_failed": 0,
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_replays": 0,
    "mig": 0,
    "mig_pending": 0,
    "process": [4711, 47 * GB],
    "field_82": 70,  # temperature of the memory
    "field_91": 18,  # NVLinks
    "field_165": 1,  # each of them is up
    **dict.fromkeys(("field_38", "field_45", "field_52", "field_59"), 0),  # their errors
    "field_138": 0,  # KiB sent
    "field_139": 0,  # KiB received
}
# The facts that a function writes where its references point, by its other arguments.
NUMBERS = {
    "nvmlDeviceGetTemperature/0": ["temperature"],
    "nvmlDeviceGetTemperatureThreshold/1": ["slowdown"],
    "nvmlDeviceGetCudaComputeCapability": ["major", "minor"],
    "nvmlDeviceGetPowerUsage": ["power"],
    "nvmlDeviceGetEnforcedPowerLimit": ["power_limit"],
    "nvmlDeviceGetClockInfo/1": ["sm_clock"],
    "nvmlDeviceGetClockInfo/2": ["memory_clock"],
    "nvmlDeviceGetMaxClockInfo/1": ["sm_clock_max"],
    "nvmlDeviceGetCurrentClocksEventReasons": ["clock_events"],
    "nvmlDeviceGetTotalEccErrors/0/0": ["ecc_corrected"],
    "nvmlDeviceGetTotalEccErrors/1/0": ["ecc_uncorrected"],
    "nvmlDeviceGetRemappedRows": [
        *("remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failed")
    ],
    "nvmlDeviceGetCurrPcieLinkGeneration": ["pcie_generation"],
    "nvmlDeviceGetMaxPcieLinkGeneration": ["pcie_generation_max"],
    "nvmlDeviceGetCurrPcieLinkWidth": ["pcie_width"],
    "nvmlDeviceGetMaxPcieLinkWidth": ["pcie_width_max"],
    "nvmlDeviceGetPcieReplayCounter": ["pcie_replays"],
    "nvmlDeviceGetMigMode": ["mig", "mig_pending"],
}
TEXTS = {"nvmlDeviceGetUUID": "uuid", "nvmlDeviceGetName": "name"}
MEMBERS = {
    "nvmlDeviceGetUtilizationRates": [("gpu", "utilization")],
    "nvmlDeviceGetMemoryInfo": [("total", "memory_total"), ("used", "memory_used")],
}


class Library:
    """Answers NVML's functions from the file of facts; what no fact tells is not supported."""

    def __init__(self) -> None:
        self._seen = 0  # when the file was written
        self._facts: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._answer, name)

    def _answer(self, name: str, *arguments: Any) -> Any:
        file = Path(os.environ[VARIABLE])
        if (written := file.stat().st_mtime_ns) != self._seen:
            self._seen, self._facts = written, json.loads(file.read_text())
        machine, gpus = self._facts["machine"], self._facts["gpus"]
        if name in ("nvmlInitWithFlags", "nvmlShutdown"):
            return machine.get("init", nvml.NVML_SUCCESS)
        if name == "nvmlErrorString":
            return b"an error of the stand-in"
        if name == "nvmlDeviceGetCount_v2":
            arguments[0]._obj.value = len(gpus)
            return machine.get("count", nvml.NVML_SUCCESS)
        if name == "nvmlSystemGetDriverVersion":
            arguments[0].value = machine.get("driver", "").encode()
            return nvml.NVML_SUCCESS if "driver" in machine else nvml.NVML_ERROR_NOT_SUPPORTED
        if name == "nvmlSystemGetCudaDriverVersion_v2":
            arguments[0]._obj.value = machine.get("cuda", 0)
            return nvml.NVML_SUCCESS if "cuda" in machine else nvml.NVML_ERROR_NOT_SUPPORTED
        if name == "nvmlDeviceGetHandleByIndex_v2":
            index = arguments[0].value
            ctypes.c_void_p.from_buffer(arguments[1]._obj).value = 1 + index
            return nvml.NVML_ERROR_GPU_IS_LOST if gpus[index].get("gone") else nvml.NVML_SUCCESS
        gpu = gpus[(ctypes.cast(arguments[0], ctypes.c_void_p).value or 0) - 1]
        if gpu.get("lost"):
            return nvml.NVML_ERROR_GPU_IS_LOST
        return _answer_of_gpu(gpu, name, arguments[1:])


def _answer_of_gpu(gpu: dict[str, Any], name: str, arguments: tuple[Any, ...]) -> Any:
    if name == "nvmlDeviceGetFieldValues":
        for one in arguments[1]._obj:
            field = f"field_{one.fieldId}"
            value = gpu.get(f"{field}_{one.scopeId}", gpu.get(field))
            one.nvmlReturn = 0 if value is not None else nvml.NVML_ERROR_NOT_SUPPORTED
            one.valueType, one.value.ullVal = nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, value or 0
        return nvml.NVML_SUCCESS
    if name == "nvmlDeviceGetComputeRunningProcesses_v3":
        count, found = arguments
        count._obj.value = 1 if gpu["process"] else 0
        if gpu["process"] and found is None:
            return nvml.NVML_ERROR_INSUFFICIENT_SIZE
        if gpu["process"]:
            found[0].pid, found[0].usedGpuMemory = gpu["process"]
        return nvml.NVML_SUCCESS
    return _write_facts(gpu, name, arguments)


def _write_facts(gpu: dict[str, Any], name: str, arguments: tuple[Any, ...]) -> Any:
    write: dict[str, Callable[[Any], None]]
    if name in TEXTS:
        write = {TEXTS[name]: lambda text: setattr(arguments[0], "value", text.encode())}
    elif name in MEMBERS:
        target = arguments[0]._obj
        write = {fact: functools.partial(setattr, target, one) for one, fact in MEMBERS[name]}
    else:
        chosen = [str(one.value) for one in arguments if isinstance(one, ctypes.c_uint)]
        targets = [one._obj for one in arguments if hasattr(one, "_obj")]
        facts = NUMBERS.get("/".join([name, *chosen]), [])
        write = {
            fact: functools.partial(setattr, target, "value")
            for fact, target in zip(facts, targets, strict=False)
        }
    if not write or any(gpu.get(fact) is None for fact in write):
        return nvml.NVML_ERROR_NOT_SUPPORTED
    for fact, set_value in write.items():
        set_value(gpu[fact])
    return nvml.NVML_SUCCESS


def install() -> None:
    """Let pynvml of this process load the stand-in."""
    nvml.CDLL = lambda name: Library()


class Machine:
    """Writes the file of facts, into a folder of its own.

    `environment` makes pynvml of other processes load the stand-in: Python imports a
    `sitecustomize` at every start.
    """

    def __init__(self, folder: Path, *, gpus: int) -> None:
        """Begin with healthy GPUs, alike but for their UUIDs."""
        folder.mkdir()
        (folder / "sitecustomize.py").write_text("import nvml_machine\n\nnvml_machine.install()\n")
        self._file = folder / "gpus.json"
        self.paths = [str(folder), str(Path(__file__).parent)]
        self.environment = {VARIABLE: str(self._file), "PYTHONPATH": os.pathsep.join(self.paths)}
        self._machine: dict[str, object] = {}
        self._gpus: list[dict[str, object]] = [HEALTHY | {"uuid": uuid(n)} for n in range(gpus)]
        self._write()

    def driver(self, **facts: object) -> None:
        """Change what the whole machine answers."""
        self._machine |= facts
        self._write()

    def gpu(self, index: int, **facts: object) -> None:
        """Change what a GPU answers; None: that it does not support it."""
        self._gpus[index] |= facts
        self._write()

    def _write(self) -> None:
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps({"machine": self._machine, "gpus": self._gpus}))
        temporary.replace(self._file)


def uuid(index: int) -> str:
    """Return the UUID of a GPU of the machine."""
    return f"GPU-{index}c0ffee0-0000-4000-8000-00000000000{index}"
