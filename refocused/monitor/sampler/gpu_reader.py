"""Read the GPUs of a machine through NVML.

Each value is queried separately, since GPUs, drivers and modes differ in what they report.
"""

import collections
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pynvml

from refocused.monitor.readings import GpuSample, Rates
from refocused.monitor.sampler.machine_readings import GB
from refocused.system.errors import RefocusedError

SLOW_SECONDS = 30.0  # between queries of values that rarely change, are many, or are means
LIMIT_SECONDS = 120.0  # without persistence mode eight GPUs take tens of seconds to wake up
QUERY = [sys.executable, "-P", "-m", "refocused.monitor.sampler.gpu_reader"]

Identity = tuple[str | None, str | None]  # UUID and name of a GPU; None: unknown
Capability = tuple[int, int]


# Reasons for a lower clock that are a bad sign. 0x4, the power limit, is normal.
THROTTLE_REASONS = {
    pynvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "hw_power_brake",
}
_GONE = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
_SLOWDOWN = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
_CORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
_UNCORRECTED = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
_VOLATILE = pynvml.NVML_VOLATILE_ECC


def _milliwatts(number: int) -> float:
    return round(number / 1000, 1)


def _gb(memory: int | None) -> float | None:
    return memory and round(memory / GB, 3)


# By field of a reading: the conversion (None: none), NVML's function, and its arguments after the
# GPU.
_Queries = Mapping[str, tuple[Any, ...]]
_CONSTANT: _Queries = {
    "uuid": (None, pynvml.nvmlDeviceGetUUID),
    "name": (None, pynvml.nvmlDeviceGetName),
    "memory_total_gb": (lambda memory: memory.total / GB, pynvml.nvmlDeviceGetMemoryInfo),
    "slowdown_celsius": (None, pynvml.nvmlDeviceGetTemperatureThreshold, _SLOWDOWN),
    "sm_clock_max_mhz": (None, pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
    "pcie_generation_max": (None, pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
    "pcie_width_max": (None, pynvml.nvmlDeviceGetMaxPcieLinkWidth),
}
_MEASURED: _Queries = {
    "utilization_fraction": (lambda rates: rates.gpu / 100, pynvml.nvmlDeviceGetUtilizationRates),
    "memory_used_gb": (lambda memory: _gb(memory.used), pynvml.nvmlDeviceGetMemoryInfo),
    "temperature_celsius": (None, pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
    "power_watts": (_milliwatts, pynvml.nvmlDeviceGetPowerUsage),
    "power_limit_watts": (_milliwatts, pynvml.nvmlDeviceGetEnforcedPowerLimit),
    "sm_clock_mhz": (None, pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
    "memory_clock_mhz": (None, pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
    "clock_event_bits": (None, pynvml.nvmlDeviceGetCurrentClocksEventReasons),
    "ecc_corrected": (None, pynvml.nvmlDeviceGetTotalEccErrors, _CORRECTED, _VOLATILE),
    "ecc_uncorrected": (None, pynvml.nvmlDeviceGetTotalEccErrors, _UNCORRECTED, _VOLATILE),
    "processes": (
        lambda processes: {process.pid: _gb(process.usedGpuMemory) for process in processes},
        pynvml.nvmlDeviceGetComputeRunningProcesses,
    ),
}
_HEALTH: _Queries = {
    "remapped_rows": (lambda rows: rows[0] + rows[1], pynvml.nvmlDeviceGetRemappedRows),
    "remap_pending": (lambda rows: bool(rows[2]), pynvml.nvmlDeviceGetRemappedRows),
    "remap_failed": (lambda rows: bool(rows[3]), pynvml.nvmlDeviceGetRemappedRows),
    "pcie_generation": (None, pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
    "pcie_width": (None, pynvml.nvmlDeviceGetCurrPcieLinkWidth),
    "pcie_replays": (None, pynvml.nvmlDeviceGetPcieReplayCounter),
    "mig": (lambda modes: bool(modes[0]), pynvml.nvmlDeviceGetMigMode),
}

Field = tuple[int, int]  # NVML's number of a field, and its scope
_ALL_LINKS = 0xFFFFFFFF  # the scope that sums a field over all NVLinks
_LINK_COUNT = (pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0)
_LINK_UP = 1  # of NVML_FI_DEV_NVLINK_GET_STATE
_LINK_ERRORS = [
    (pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 0),
    (pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, 0),
    (pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0),
    (pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 0),
]
_MEMORY_TEMPERATURE = (pynvml.NVML_FI_DEV_MEMORY_TEMP, 0)
_LINK_TRAFFIC = [
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
    (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
]
_MEMBERS = {  # of the union that holds a field's value, by its type
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


class LostError(Exception):
    """The GPU is lost; every query raises this."""


def answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a query; None if this GPU, driver or mode does not support it."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _GONE:
            raise LostError from error
        return None
    except pynvml.NVMLLibraryMismatchError:  # an older driver lacks the function
        return None


def _answers(handle: Any, queries: _Queries) -> Iterator[tuple[str, Any]]:
    """Yield fields of a reading, each as soon as it is known."""
    for name, (convert, function, *arguments) in queries.items():
        result = answer(function, handle, *arguments)
        yield name, result if result is None or convert is None else convert(result)


def _fields(handle: Any, *fields: Field) -> list[int | None]:
    """Return the values of fields, read in one call; None: the GPU does not support it."""
    values = answer(pynvml.nvmlDeviceGetFieldValues, handle, list(fields)) or []
    known = [
        int(getattr(field.value, _MEMBERS.get(field.valueType, "ullVal")))
        if field.nvmlReturn == pynvml.NVML_SUCCESS
        else None
        for field in values
    ]
    return known or [None] * len(fields)


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


class NoGpusError(RefocusedError):
    """NVIDIA's library cannot be used; the text states why, and what to do about a fault."""

    def __init__(self, text: str, *, is_fault: bool) -> None:
        super().__init__(text)
        self.is_fault = is_fault  # a driver is installed, so there should be GPUs


class GpuReader:
    """Reads all GPUs of this machine."""

    def __init__(
        self,
        *,
        host: str,
        visible: str | None = None,
        cuda_order: str | None = None,
        ranks: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the library, and query the constant fields.

        `visible` and `cuda_order` are CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER of the `ranks` on
        this machine; `clock` returns monotonic seconds.

        Raises:
            NoGpusError: As `open_library`.
        """
        self._clock = clock
        # By index: NVML's handle (None: lost before it was opened), and constant fields.
        self._gpus: list[tuple[Any, dict[str, Any]]] = []
        for index in range(open_library()):
            handle, facts = None, dict[str, Any]()
            with contextlib.suppress(pynvml.NVMLError, LostError):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                facts.update(_answers(handle, _CONSTANT))  # keeps what was read before it was lost
                [facts["nvlinks_total"]] = _fields(handle, _LINK_COUNT)
            self._gpus.append((handle, facts))
        names = [(facts.get("uuid"), facts.get("name")) for _, facts in self._gpus]
        devices = visible_devices(names, visible=visible, cuda_order=cuda_order)[:ranks]
        owners = {index: rank for rank, index in enumerate(devices)}  # rank N has CUDA's device N
        for index, (_, facts) in enumerate(self._gpus):
            facts |= {"host": host, "index": index, "local_rank": owners.get(index)}
        self._slow_values: dict[int, tuple[float, Mapping[str, Any]]] = {}
        self._traffic = collections.defaultdict[int, Rates](Rates)
        self.count = len(self._gpus)

    def samples(self) -> list[GpuSample]:
        """Return a reading of each GPU, in NVML's order."""
        return [self._sample(handle, facts) for handle, facts in self._gpus]

    def close(self) -> None:
        """Close the library."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _sample(self, handle: Any, facts: Mapping[str, Any]) -> GpuSample:
        if handle is None:
            return GpuSample(**facts, lost=True)
        try:
            values = dict(_answers(handle, _MEASURED))
            bits = values["clock_event_bits"]
            if bits is not None:
                names = (name for bit, name in THROTTLE_REASONS.items() if bits & bit)
                values["throttle_reasons"] = tuple(names)
            [values["memory_temperature_celsius"]] = _fields(handle, _MEMORY_TEMPERATURE)
            return GpuSample(**facts, **values, **self._slow(handle, facts))
        except LostError:
            self._slow_values.pop(facts["index"], None)
            return GpuSample(**facts, lost=True)

    def _slow(self, handle: Any, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what shows damage or a wrong set-up, and the traffic over the NVLinks."""
        now, index = self._clock(), facts["index"]
        if index in self._slow_values and now - self._slow_values[index][0] < SLOW_SECONDS:
            return self._slow_values[index][1]
        values = dict(_answers(handle, _HEALTH))
        if links := facts.get("nvlinks_total") or 0:
            states = [(pynvml.NVML_FI_DEV_NVLINK_GET_STATE, link) for link in range(links)]
            counts = _fields(handle, *states, *_LINK_ERRORS)
            is_up = [state if state is None else state == _LINK_UP for state in counts[:links]]
            values["nvlinks_active"] = _total(is_up)
            values["nvlink_errors"] = _total(counts[links:])
            moved = [
                None if kib is None else kib * 1024 / GB for kib in _fields(handle, *_LINK_TRAFFIC)
            ]
            sent, received = self._traffic[index].since_last(now, moved)
            values["nvlink_sent_gb_per_second"] = sent
            values["nvlink_received_gb_per_second"] = received
        self._slow_values[index] = now, values
        return values


def visible_devices(
    gpus: Sequence[Identity], *, visible: str | None, cuda_order: str | None
) -> list[int | None]:
    """Return NVML's index of each of CUDA's devices; None: it cannot be determined.

    NVML numbers GPUs in the order of the PCI bus. So does CUDA if CUDA_DEVICE_ORDER is PCI_BUS_ID;
    otherwise it begins with the fastest, which is the same order if all are of one kind. An entry
    of CUDA_VISIBLE_DEVICES (`visible`) is an index or the beginning of one UUID. CUDA ignores all
    entries after an invalid one, and sees no GPU if one is named twice.
    """
    kinds = {name for _, name in gpus if name is not None}
    same_order = cuda_order == "PCI_BUS_ID" or len(kinds) <= 1
    if visible is None:
        return [index if same_order else None for index in range(len(gpus))]
    devices: list[int | None] = []
    for word in (part.strip() for part in visible.split(",")):
        named = [index for index, (uuid, _) in enumerate(gpus) if (uuid or "").startswith(word)]
        if word.isdecimal() and int(word) < len(gpus):
            devices.append(int(word) if same_order else None)
        elif word.startswith("GPU-") and len(named) == 1:
            devices.append(named[0])
        else:
            break
    known = [index for index in devices if index is not None]
    return [] if len(set(known)) < len(known) else devices


def open_library() -> int:
    """Open NVIDIA's library; return the number of GPUs, or raise NoGpusError if unusable."""
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            text = "This machine has no NVIDIA driver: only CPU, memory, disk, network are watched."
            raise NoGpusError(text, is_fault=False) from error
        what = {
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the versions of its library and its kernel "
            "module differ, as after an update without a restart. Restart the machine",
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "its kernel module is not loaded. Restart the "
            "machine, or reinstall the driver",
            pynvml.NVML_ERROR_NO_PERMISSION: "this user has no permission. Give it access to "
            "/dev/nvidiactl",
        }.get(error.value, f"{error}. Check the output of nvidia-smi")
        text = f"The NVIDIA driver does not answer: {what}. Until then no GPU can be used."
        raise NoGpusError(text, is_fault=True) from error


def driver_versions() -> tuple[str | None, tuple[int, int] | None]:
    """Return the driver's version and the newest CUDA version that it supports; None: unknown.

    The library must be open.
    """
    driver = answer(pynvml.nvmlSystemGetDriverVersion)
    number = answer(pynvml.nvmlSystemGetCudaDriverVersion_v2)  # 12080 is 12.8
    return driver, None if number is None else (number // 1000, number % 1000 // 10)


def gpu_capabilities() -> list[Capability | None]:
    """Return the compute capability of each GPU of this machine; None: unknown; see `gpu_names`."""
    pairs = _asked_driver()["capabilities"]
    return [None if pair is None else (pair[0], pair[1]) for pair in pairs]


def gpu_names() -> list[str | None]:
    """Return the driver's name of each GPU of this machine; None: unknown.

    A child process queries the driver, since a hanging driver blocks its caller. After the time
    limit the child is abandoned: even SIGKILL may not end it.

    Raises:
        NoGpusError: The driver is installed and cannot be used.
        RefocusedError: It hangs.
    """
    return list(_asked_driver()["names"])


def _asked_driver() -> dict[str, Any]:
    query = subprocess.Popen(
        QUERY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        answer, _ = query.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        query.kill()
        raise RefocusedError(
            f"The NVIDIA driver did not answer within {LIMIT_SECONDS:.0f} s. Try again, restart "
            "the machine, or train without GPUs (run.device=cpu)."
        ) from None
    if query.returncode:
        text = f"The NVIDIA driver does not answer: the query exited with {query.returncode}. "
        raise NoGpusError(f"{text}Check the output of nvidia-smi.", is_fault=True)
    result: dict[str, Any] = json.loads(answer)
    if "fault" in result:
        raise NoGpusError(result["fault"], is_fault=True)
    return result


def _query_driver() -> dict[str, Any]:
    try:
        capabilities: list[Capability | None] = [None] * open_library()
    except NoGpusError as error:
        return {"fault": str(error)} if error.is_fault else {"capabilities": [], "names": []}
    names: list[str | None] = [None] * len(capabilities)
    for index in range(len(capabilities)):
        with contextlib.suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            capabilities[index] = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            names[index] = pynvml.nvmlDeviceGetName(handle)
    return {"capabilities": capabilities, "names": names}


if __name__ == "__main__":
    print(json.dumps(_query_driver()))
