"""What NVIDIA's library answers of one GPU, as fields of a sample.

Each value is asked for by itself, since GPUs, drivers and modes differ in what they can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pynvml

GIB = 2**30
# NVML's reasons for a lower clock that are no good sign. 0x4, the power limit, is normal.
THROTTLE_REASONS = {
    pynvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "hw_power_brake",
}
_ALL_LINKS = 0xFFFFFFFF  # the scope of a field that sums it over all NVLinks
_LINK_UP = 1  # of NVML_FI_DEV_NVLINK_GET_STATE
_LINK_ERRORS = (
    pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
)
_MEMORY_TEMPERATURE = (pynvml.NVML_FI_DEV_MEMORY_TEMP, 0)
LINK_SENT = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS)
LINK_RECEIVED = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS)
# After one of these a GPU answers nothing any more.
_GONE = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)

Field = tuple[int, int]  # NVML's number of a field, and its scope


class LostError(Exception):
    """The GPU that was asked is gone."""


def constants(handle: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a sample that never change, each as soon as it is known.

    Raises:
        LostError: The GPU is gone; what was told before stands.
    """
    memory = _asked(pynvml.nvmlDeviceGetMemoryInfo, handle)
    yield "uuid", _asked(pynvml.nvmlDeviceGetUUID, handle)
    yield "name", _asked(pynvml.nvmlDeviceGetName, handle)
    yield "memory_total_gib", None if memory is None else memory.total / GIB
    slowdown = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    yield "slowdown_celsius", _asked(pynvml.nvmlDeviceGetTemperatureThreshold, handle, slowdown)
    yield (
        "sm_clock_max_mhz",
        _asked(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
    )
    yield "pcie_generation_max", _asked(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    yield "pcie_width_max", _asked(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    count = (pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0)
    yield "nvlinks_total", fields(handle, [count]).get(count)


def measured(handle: Any) -> dict[str, Any]:
    """Return the fields of a sample that NVML has a function for.

    Raises:
        LostError: The GPU is gone.
    """
    rates = _asked(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _asked(pynvml.nvmlDeviceGetMemoryInfo, handle)
    bits = _asked(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    return {
        "utilization_fraction": None if rates is None else rates.gpu / 100,
        "memory_used_gib": None if memory is None else round(memory.used / GIB, 3),
        "memory_temperature_celsius": fields(handle, [_MEMORY_TEMPERATURE]).get(
            _MEMORY_TEMPERATURE
        ),
        "temperature_celsius": _asked(
            pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        "power_watts": _watts(_asked(pynvml.nvmlDeviceGetPowerUsage, handle)),
        "power_limit_watts": _watts(_asked(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        "sm_clock_mhz": _asked(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": _asked(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        "throttle_reasons": None if bits is None else throttle_reasons(bits),
        "clock_event_bits": bits,
        "ecc_corrected": _ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "ecc_uncorrected": _ecc(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        "processes": _processes(handle),
    }


def health(handle: Any) -> dict[str, Any]:
    """Return what tells of old damage and of a wrong set-up.

    Raises:
        LostError: The GPU is gone.
    """
    rows = _asked(pynvml.nvmlDeviceGetRemappedRows, handle) or (None, None, None, None)
    mig = _asked(pynvml.nvmlDeviceGetMigMode, handle)
    return {
        "remapped_rows": _sum(rows[:2]),
        "remap_pending": _yes(rows[2]),
        "remap_failed": _yes(rows[3]),
        "pcie_generation": _asked(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        "pcie_width": _asked(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "pcie_replays": _asked(pynvml.nvmlDeviceGetPcieReplayCounter, handle),
        "mig": None if mig is None else bool(mig[0]),
    }


def link_health(handle: Any, count: int) -> dict[str, Any]:
    """Return how many of a GPU's NVLinks are up, and their errors."""
    if not count:
        return {"nvlinks_active": None, "nvlink_errors": None}
    states = [(pynvml.NVML_FI_DEV_NVLINK_GET_STATE, link) for link in range(count)]
    errors = [(field, 0) for field in _LINK_ERRORS]
    found = fields(handle, [*states, *errors])
    known = [state for link in states if (state := found.get(link)) is not None]
    return {
        "nvlinks_active": sum(state == _LINK_UP for state in known) if known else None,
        "nvlink_errors": _sum(found.get(error) for error in errors),
    }


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """Return the names of those reasons for a lower clock that are no good sign."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def _asked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return an answer; None where this GPU, driver or mode has none.

    Raises:
        LostError: The GPU is gone.
    """
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _GONE:
            raise LostError from error
        return None
    except pynvml.NVMLLibraryMismatchError:  # an older driver lacks the function
        return None


def fields(handle: Any, wanted: list[Field]) -> dict[Field, int]:
    """Return the values of those fields that the GPU knows, read in one call."""
    values = _asked(pynvml.nvmlDeviceGetFieldValues, handle, wanted) or []
    return {
        field: _whole(value)
        for field, value in zip(wanted, values, strict=False)
        if value.nvmlReturn == pynvml.NVML_SUCCESS
    }


def _whole(value: Any) -> int:
    """Return the member of a field's union that its type names."""
    member = {
        pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
    }.get(value.valueType, "ullVal")
    return int(getattr(value.value, member))


def _ecc(handle: Any, kind: int) -> Any:
    return _asked(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, pynvml.NVML_VOLATILE_ECC)


def _processes(handle: Any) -> dict[int, float | None] | None:
    found = _asked(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if found is None:
        return None
    return {
        each.pid: None if each.usedGpuMemory is None else round(each.usedGpuMemory / GIB, 3)
        for each in found
    }


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else round(milliwatts / 1000, 1)


def _yes(number: int | None) -> bool | None:
    return None if number is None else bool(number)


def _sum(numbers: Any) -> int | None:
    """Return the sum of the known ones; None when none is."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None
