"""Query NVIDIA's library for one GPU: the values as fields of a reading.

Each value is queried separately, since GPUs, drivers and modes differ in what they report.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pynvml as nvml

from refocused.monitor.sampler.machine_readings import GIB

# Reasons for a lower clock that are a bad sign. 0x4, the power limit, is normal.
THROTTLE_REASONS = {
    nvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
    nvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal",
    nvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal",
    nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "hw_power_brake",
}
_GONE = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
_CORRECTED, _UNCORRECTED = (
    (nvml.nvmlDeviceGetTotalEccErrors, kind, nvml.NVML_VOLATILE_ECC)
    for kind in (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
)


def _milliwatts(number: int) -> float:
    return round(number / 1000, 1)


# By field of a reading: the conversion (None: none), NVML's function, and its arguments after the
# GPU.
_Queries = Mapping[str, tuple[Any, ...]]
_CONSTANT: _Queries = {
    "uuid": (None, nvml.nvmlDeviceGetUUID),
    "name": (None, nvml.nvmlDeviceGetName),
    "memory_total_gib": (lambda memory: memory.total / GIB, nvml.nvmlDeviceGetMemoryInfo),
    "slowdown_celsius": (
        None,
        nvml.nvmlDeviceGetTemperatureThreshold,
        nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    ),
    "sm_clock_max_mhz": (None, nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
    "pcie_generation_max": (None, nvml.nvmlDeviceGetMaxPcieLinkGeneration),
    "pcie_width_max": (None, nvml.nvmlDeviceGetMaxPcieLinkWidth),
}
_MEASURED: _Queries = {
    "utilization_fraction": (lambda rates: rates.gpu / 100, nvml.nvmlDeviceGetUtilizationRates),
    "memory_used_gib": (lambda memory: round(memory.used / GIB, 3), nvml.nvmlDeviceGetMemoryInfo),
    "temperature_celsius": (None, nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
    "power_watts": (_milliwatts, nvml.nvmlDeviceGetPowerUsage),
    "power_limit_watts": (_milliwatts, nvml.nvmlDeviceGetEnforcedPowerLimit),
    "sm_clock_mhz": (None, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": (None, nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
    "clock_event_bits": (None, nvml.nvmlDeviceGetCurrentClocksEventReasons),
    "ecc_corrected": (None, *_CORRECTED),
    "ecc_uncorrected": (None, *_UNCORRECTED),
    "processes": (
        lambda found: {p.pid: p.usedGpuMemory and round(p.usedGpuMemory / GIB, 3) for p in found},
        nvml.nvmlDeviceGetComputeRunningProcesses,
    ),
}
_HEALTH: _Queries = {
    "remapped_rows": (lambda rows: rows[0] + rows[1], nvml.nvmlDeviceGetRemappedRows),
    "remap_pending": (lambda rows: bool(rows[2]), nvml.nvmlDeviceGetRemappedRows),
    "remap_failed": (lambda rows: bool(rows[3]), nvml.nvmlDeviceGetRemappedRows),
    "pcie_generation": (None, nvml.nvmlDeviceGetCurrPcieLinkGeneration),
    "pcie_width": (None, nvml.nvmlDeviceGetCurrPcieLinkWidth),
    "pcie_replays": (None, nvml.nvmlDeviceGetPcieReplayCounter),
    "mig": (lambda modes: bool(modes[0]), nvml.nvmlDeviceGetMigMode),
}

Field = tuple[int, int]  # NVML's number of a field, and its scope
_ALL_LINKS = 0xFFFFFFFF  # the scope that sums a field over all NVLinks
_LINK_COUNT = (nvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0)
_LINK_UP = 1  # of NVML_FI_DEV_NVLINK_GET_STATE
_LINK_ERRORS = [
    (nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 0),
    (nvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, 0),
    (nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0),
    (nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 0),
]
_MEMORY_TEMPERATURE = (nvml.NVML_FI_DEV_MEMORY_TEMP, 0)
_LINK_SENT = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS)
_LINK_RECEIVED = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS)


class LostError(Exception):
    """The GPU is lost; all functions here raise this."""


def constants(handle: Any) -> Iterator[tuple[str, Any]]:
    """Yield the constant fields of a reading, each as soon as it is known."""
    yield from _answers(handle, _CONSTANT)
    yield "nvlinks_total", _fields(handle, [_LINK_COUNT]).get(_LINK_COUNT)


def measured(handle: Any) -> dict[str, Any]:
    """Return the fields of a reading that change continuously."""
    found = dict(_answers(handle, _MEASURED))
    bits = found["clock_event_bits"]
    names = (name for bit, name in THROTTLE_REASONS.items() if bits is not None and bits & bit)
    found["throttle_reasons"] = None if bits is None else tuple(names)
    celsius = _fields(handle, [_MEMORY_TEMPERATURE]).get(_MEMORY_TEMPERATURE)
    return {**found, "memory_temperature_celsius": celsius}


def health(handle: Any, links: int) -> dict[str, Any]:
    """Return the fields that show damage or a wrong set-up; `links` is the number of NVLinks."""
    found = dict(_answers(handle, _HEALTH))
    if links:
        states = [(nvml.NVML_FI_DEV_NVLINK_GET_STATE, link) for link in range(links)]
        values = _fields(handle, [*states, *_LINK_ERRORS])
        known = [values[link] for link in states if link in values]
        errors = [values[error] for error in _LINK_ERRORS if error in values]
        found["nvlinks_active"] = sum(state == _LINK_UP for state in known) if known else None
        found["nvlink_errors"] = sum(errors) if errors else None
    return found


def link_traffic_gib(handle: Any) -> list[float | None]:
    """Return the total sent and received over all NVLinks, in GiB."""
    wanted = [_LINK_SENT, _LINK_RECEIVED]
    found = _fields(handle, wanted)
    return [found[field] / 2**20 if field in found else None for field in wanted]


def _answers(handle: Any, queries: _Queries) -> Iterator[tuple[str, Any]]:
    for name, (convert, function, *arguments) in queries.items():
        found = answer(function, handle, *arguments)
        yield name, found if found is None or convert is None else convert(found)


def answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a query; None if this GPU, driver or mode does not support it."""
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        if error.value in _GONE:
            raise LostError from error
        return None
    except nvml.NVMLLibraryMismatchError:  # an older driver lacks the function
        return None


def _fields(handle: Any, wanted: Iterable[Field]) -> dict[Field, int]:
    """Return the values of those fields that the GPU supports, read in one call."""
    fields = list(wanted)
    values = answer(nvml.nvmlDeviceGetFieldValues, handle, fields) or []
    return {
        field: _whole(value)
        for field, value in zip(fields, values, strict=False)
        if value.nvmlReturn == nvml.NVML_SUCCESS
    }


def _whole(value: Any) -> int:
    """Return the member of a field's union that its type indicates."""
    member = {
        nvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        nvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
    }.get(value.valueType, "ullVal")
    return int(getattr(value.value, member))
