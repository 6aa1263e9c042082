"""What NVIDIA's library says of a machine's GPUs, as samples.

Each value is asked for by itself, since GPUs, drivers and modes differ in what they can tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pynvml

from refocused.errors import RefocusedError
from refocused.monitoring.gpu_numbers import local_ranks
from refocused.monitoring.samples import GpuSample

GIB = 2**30
SLOW_SECONDS = 30.0
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
_LINK_SENT = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS)
_LINK_RECEIVED = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS)
# After one of these a GPU answers nothing any more.
_GONE = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)

Field = tuple[int, int]  # NVML's number of a field, and its scope


class NoGpusError(RefocusedError):
    """NVIDIA's library cannot be used; the text says why, and what to do where that is a fault.

    Attributes:
        is_fault: There should be GPUs; without a driver at all there are none.
    """

    def __init__(self, text: str, *, is_fault: bool) -> None:
        """Say why."""
        super().__init__(text)
        self.is_fault = is_fault


class _LostError(Exception):
    """The GPU that was asked is gone."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Gpu:
    """A GPU, and what of it never changes.

    Attributes:
        handle: NVML's; None: it was lost before it could be opened.
        facts: Fields of its sample.
    """

    handle: Any
    facts: Mapping[str, Any]


class GpuReader:
    """Reads all GPUs of this machine, as often as it is asked."""

    def __init__(
        self,
        *,
        host: str,
        visible: str | None = None,
        cuda_order: str | None = None,
        ranks: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the library, and ask what does not change.

        Args:
            host: Name of this machine.
            visible: CUDA_VISIBLE_DEVICES of the ranks; None: it is not set.
            cuda_order: CUDA_DEVICE_ORDER of the ranks; None: it is not set.
            ranks: Of the run, on this machine.
            clock: Monotonic seconds.

        Raises:
            NoGpusError: There is no driver, or it cannot be talked to.
        """
        count = _open_library()
        self._clock = clock
        self._counted: dict[int, tuple[float, int | None, int | None]] = {}
        self._slow_values: dict[int, tuple[float | None, Mapping[str, Any]]] = {}
        gpus = [_opened(index) for index in range(count)]
        owners = local_ranks(
            [(gpu.facts.get("uuid"), gpu.facts.get("name")) for gpu in gpus],
            visible=visible,
            cuda_order=cuda_order,
            ranks=ranks,
        )
        self._gpus = [
            dataclasses.replace(
                gpu, facts={**gpu.facts, "host": host, "index": index, "local_rank": owner}
            )
            for index, (gpu, owner) in enumerate(zip(gpus, owners, strict=True))
        ]

    @property
    def count(self) -> int:
        """How many GPUs there were when the library was opened."""
        return len(self._gpus)

    def samples(self) -> list[GpuSample]:
        """Return a sample of each GPU now, in NVML's order."""
        return [self._sample(gpu) for gpu in self._gpus]

    def close(self) -> None:
        """Close the library."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _sample(self, gpu: _Gpu) -> GpuSample:
        if gpu.handle is None:
            return GpuSample(**gpu.facts, lost=True)
        try:
            return GpuSample(**gpu.facts, **_measured(gpu.handle), **self._slow(gpu))
        except _LostError:
            self._slow_values.pop(gpu.facts["index"], None)
            return GpuSample(**gpu.facts, lost=True)

    def _slow(self, gpu: _Gpu) -> Mapping[str, Any]:
        """Return what rarely changes, is many values or a mean: asked every `SLOW_SECONDS`."""
        now, index = self._clock(), gpu.facts["index"]
        asked, values = self._slow_values.get(index, (None, {}))
        if asked is None or now - asked >= SLOW_SECONDS:
            links = gpu.facts.get("nvlinks_total") or 0
            values = {**_health(gpu.handle), **_links(gpu.handle, links)}
            if links:
                values |= self._traffic(gpu)
            self._slow_values[index] = (now, values)
        return values

    def _traffic(self, gpu: _Gpu) -> dict[str, float | None]:
        """Return what went over the NVLinks, as a mean since it was last asked."""
        found = _fields(gpu.handle, [_LINK_SENT, _LINK_RECEIVED])
        sent, received = self._rates(
            gpu.facts["index"], found.get(_LINK_SENT), found.get(_LINK_RECEIVED)
        )
        return {"nvlink_sent_gib_per_second": sent, "nvlink_received_gib_per_second": received}

    def _rates(
        self, index: int, sent_kib: int | None, received_kib: int | None
    ) -> tuple[float | None, float | None]:
        """Return GiB a second since the last call, from what was ever sent and received."""
        now, before = self._clock(), self._counted.get(index)
        self._counted[index] = (now, sent_kib, received_kib)
        if before is None or now <= before[0]:
            return None, None
        seconds = now - before[0]
        return _rate(before[1], sent_kib, seconds), _rate(before[2], received_kib, seconds)


def _open_library() -> int:
    """Open the library; return how many GPUs it knows."""
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            raise NoGpusError(
                "This machine has no NVIDIA driver: only the CPU, memory, disk and network are "
                "watched.",
                is_fault=False,
            ) from error
        raise NoGpusError(_fault(error), is_fault=True) from error


def _fault(error: Any) -> str:
    """Say why a driver that is there does not answer, and what helps."""
    what = {
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "its library and its kernel module are of "
        "different versions, as after an update without a restart. Restart the machine",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "its kernel module is not loaded. Restart the "
        "machine, or install the driver again",
        pynvml.NVML_ERROR_NO_PERMISSION: "this user may not open it. Give it access to "
        "/dev/nvidiactl",
    }.get(error.value, f"{error}. See what nvidia-smi says")
    return f"The NVIDIA driver does not answer: {what}. Until then no GPU is watched."


def _opened(index: int) -> _Gpu:
    """Open a GPU, and ask what never changes; one that is gone has no handle."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError:
        return _Gpu(None, {})
    facts: dict[str, Any] = {}
    with contextlib.suppress(_LostError):
        facts.update(_constants(handle))  # what was told before it was lost stays
    return _Gpu(handle, facts)


def _constants(handle: Any) -> Iterator[tuple[str, Any]]:
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
    yield "nvlinks_total", _fields(handle, [count]).get(count)


def _measured(handle: Any) -> dict[str, Any]:
    """Return the fields of a sample that NVML has a function for.

    Raises:
        _LostError: The GPU is gone.
    """
    rates = _asked(pynvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _asked(pynvml.nvmlDeviceGetMemoryInfo, handle)
    bits = _asked(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    return {
        "utilization_fraction": None if rates is None else rates.gpu / 100,
        "memory_used_gib": None if memory is None else round(memory.used / GIB, 3),
        "memory_temperature_celsius": _fields(handle, [_MEMORY_TEMPERATURE]).get(
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


def _health(handle: Any) -> dict[str, Any]:
    """Return what tells of old damage and of a wrong set-up.

    Raises:
        _LostError: The GPU is gone.
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


def _links(handle: Any, count: int) -> dict[str, Any]:
    """Return how many of a GPU's NVLinks are up, and their errors."""
    if not count:
        return {"nvlinks_active": None, "nvlink_errors": None}
    states = [(pynvml.NVML_FI_DEV_NVLINK_GET_STATE, link) for link in range(count)]
    errors = [(field, 0) for field in _LINK_ERRORS]
    found = _fields(handle, [*states, *errors])
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
        _LostError: The GPU is gone.
    """
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _GONE:
            raise _LostError from error
        return None
    except pynvml.NVMLLibraryMismatchError:  # an older driver lacks the function
        return None


def _fields(handle: Any, wanted: list[Field]) -> dict[Field, int]:
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


def _rate(before_kib: int | None, now_kib: int | None, seconds: float) -> float | None:
    if before_kib is None or now_kib is None or now_kib < before_kib:
        return None
    return round((now_kib - before_kib) / 2**20 / seconds, 3)
