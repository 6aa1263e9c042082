"""A machine with GPUs that a test describes: the real pynvml over a stand-in of its library."""

import ctypes
import functools
import json
import os
from pathlib import Path
from typing import Any

import pynvml as nvml

VARIABLE = "STAND_IN_NVML"  # names the file of facts
GB = 10**9
# What an H100 at work answers, in NVML's units: the function with its other arguments, what it
# writes of the structure that its reference points to, and the value.
FACTS: dict[str, tuple[str, str, Any]] = {
    "uuid": ("nvmlDeviceGetUUID", "value", ""),
    "name": ("nvmlDeviceGetName", "value", "NVIDIA H100 80GB HBM3"),
    "utilization": ("nvmlDeviceGetUtilizationRates", "gpu", 97),
    "memory_total": ("nvmlDeviceGetMemoryInfo", "total", 80 * GB),
    "memory_used": ("nvmlDeviceGetMemoryInfo", "used", 48 * GB),
    "temperature": ("nvmlDeviceGetTemperature/0", "value", 61),
    "slowdown": ("nvmlDeviceGetTemperatureThreshold/1", "value", 87),
    "major": ("nvmlDeviceGetCudaComputeCapability", "value", None),
    "minor": ("nvmlDeviceGetCudaComputeCapability", "value", None),
    "power": ("nvmlDeviceGetPowerUsage", "value", 640_500),
    "power_limit": ("nvmlDeviceGetEnforcedPowerLimit", "value", 700_000),
    "sm_clock": ("nvmlDeviceGetClockInfo/1", "value", 1755),
    "memory_clock": ("nvmlDeviceGetClockInfo/2", "value", 2619),
    "sm_clock_max": ("nvmlDeviceGetMaxClockInfo/1", "value", 1980),
    "clock_events": ("nvmlDeviceGetCurrentClocksEventReasons", "value", 0x4),
    "ecc_corrected": ("nvmlDeviceGetTotalEccErrors/0/0", "value", 0),
    "ecc_uncorrected": ("nvmlDeviceGetTotalEccErrors/1/0", "value", 0),
    "remapped_corrected": ("nvmlDeviceGetRemappedRows", "value", 0),
    "remapped_uncorrected": ("nvmlDeviceGetRemappedRows", "value", 0),
    "remap_pending": ("nvmlDeviceGetRemappedRows", "value", 0),
    "remap_failed": ("nvmlDeviceGetRemappedRows", "value", 0),
    "pcie_generation": ("nvmlDeviceGetCurrPcieLinkGeneration", "value", 5),
    "pcie_generation_max": ("nvmlDeviceGetMaxPcieLinkGeneration", "value", 5),
    "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth", "value", 16),
    "pcie_width_max": ("nvmlDeviceGetMaxPcieLinkWidth", "value", 16),
    "pcie_replays": ("nvmlDeviceGetPcieReplayCounter", "value", 0),
    "mig": ("nvmlDeviceGetMigMode", "value", 0),
    "mig_pending": ("nvmlDeviceGetMigMode", "value", 0),
}
HEALTHY: dict[str, Any] = {name: value for name, (_, _, value) in FACTS.items()} | {
    "process": [4711, 47 * GB],
    # NVML's fields by their numbers.
    "field_82": 70,  # temperature of the memory
    "field_91": 18,  # NVLinks
    "field_165": 1,  # each of them is up
    **dict.fromkeys(("field_38", "field_45", "field_52", "field_59"), 0),  # their errors
    "field_138": 0,  # KiB sent
    "field_139": 0,  # KiB received
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
    is_text = isinstance(arguments[0], ctypes.Array)  # its size follows
    chosen = [] if is_text else [one.value for one in arguments if isinstance(one, ctypes.c_uint)]
    function = "/".join(map(str, [name, *chosen]))
    targets = [arguments[0]] if is_text else [one._obj for one in arguments if hasattr(one, "_obj")]
    facts = {fact: member for fact, (known, member, _) in FACTS.items() if known == function}
    if not facts or any(gpu[fact] is None for fact in facts):
        return nvml.NVML_ERROR_NOT_SUPPORTED
    for number, (fact, member) in enumerate(facts.items()):
        value = gpu[fact].encode() if is_text else gpu[fact]
        setattr(targets[min(number, len(targets) - 1)], member, value)
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
