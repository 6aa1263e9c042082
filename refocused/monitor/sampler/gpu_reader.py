"""Read the GPUs of a machine through NVML."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pynvml

from refocused.monitor.readings import GpuSample
from refocused.monitor.sampler.nvml_fields import (
    LINK_RECEIVED,
    LINK_SENT,
    LostError,
    constants,
    fields,
    health,
    link_health,
    measured,
)
from refocused.system.errors import RefocusedError

PCI_BUS_ORDER = "PCI_BUS_ID"


def local_ranks(
    gpus: Sequence[tuple[str | None, str | None]],
    *,
    visible: str | None,
    cuda_order: str | None,
    ranks: int,
) -> list[int | None]:
    """Return the local rank of each GPU; None: it is nobody's, or that cannot be known.

    Local rank N uses CUDA's device N, and CUDA numbers what CUDA_VISIBLE_DEVICES names. NVML
    numbers in the order of the PCI bus. CUDA does so too where it is told to; else it begins with
    the fastest, which is the same order when all are of one kind.

    Args:
        gpus: UUID and name of each, in NVML's order; None: unknown.
        visible: CUDA_VISIBLE_DEVICES; None: it is not set.
        cuda_order: CUDA_DEVICE_ORDER; None: it is not set.
        ranks: Of the run, on this machine.
    """
    devices = visible_devices(gpus, visible=visible, cuda_order=cuda_order)[:ranks]
    owners: list[int | None] = [None] * len(gpus)
    for rank, index in enumerate(devices):
        if index is not None:
            owners[index] = rank
    return owners


def visible_devices(
    gpus: Sequence[tuple[str | None, str | None]], *, visible: str | None, cuda_order: str | None
) -> list[int | None]:
    """Return NVML's number of each of CUDA's devices; None: which one it is cannot be known.

    As CUDA does it: a word is a number or the beginning of one UUID; what follows a word that
    names no GPU is not seen, and a GPU that is named twice hides all.
    """
    kinds = {name for _, name in gpus if name is not None}
    same_order = cuda_order == PCI_BUS_ORDER or len(kinds) <= 1
    if visible is None:
        return [index if same_order else None for index in range(len(gpus))]
    found: list[int | None] = []
    for word in (part.strip() for part in visible.split(",")):
        if word.isdecimal() and int(word) < len(gpus):
            found.append(int(word) if same_order else None)
        elif word.startswith("GPU-") and len(meant := _by_uuid(gpus, word)) == 1:
            found.append(meant[0])
        else:
            break
    known = [index for index in found if index is not None]
    return [] if len(set(known)) < len(known) else found


def _by_uuid(gpus: Sequence[tuple[str | None, str | None]], beginning: str) -> list[int]:
    return [index for index, (uuid, _) in enumerate(gpus) if (uuid or "").startswith(beginning)]


SLOW_SECONDS = 30.0


class NoGpusError(RefocusedError):
    """NVIDIA's library cannot be used; the text says why, and what to do where that is a fault.

    Attributes:
        is_fault: There should be GPUs; without a driver at all there are none.
    """

    def __init__(self, text: str, *, is_fault: bool) -> None:
        """Say why."""
        super().__init__(text)
        self.is_fault = is_fault


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
        count = open_library()
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
            return GpuSample(**gpu.facts, **measured(gpu.handle), **self._slow(gpu))
        except LostError:
            self._slow_values.pop(gpu.facts["index"], None)
            return GpuSample(**gpu.facts, lost=True)

    def _slow(self, gpu: _Gpu) -> Mapping[str, Any]:
        """Return what rarely changes, is many values or a mean: asked every `SLOW_SECONDS`."""
        now, index = self._clock(), gpu.facts["index"]
        asked, values = self._slow_values.get(index, (None, {}))
        if asked is None or now - asked >= SLOW_SECONDS:
            count = gpu.facts.get("nvlinks_total") or 0
            values = {**health(gpu.handle), **link_health(gpu.handle, count)}
            if count:
                values |= self._traffic(gpu)
            self._slow_values[index] = (now, values)
        return values

    def _traffic(self, gpu: _Gpu) -> dict[str, float | None]:
        """Return what went over the NVLinks, as a mean since it was last asked."""
        found = fields(gpu.handle, [LINK_SENT, LINK_RECEIVED])
        sent, received = self._rates(
            gpu.facts["index"], found.get(LINK_SENT), found.get(LINK_RECEIVED)
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


def open_library() -> int:
    """Open NVIDIA's library; return how many GPUs it knows.

    Raises:
        NoGpusError: There is no driver, or it cannot be used.
    """
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
    return f"The NVIDIA driver does not answer: {what}. Until then no GPU can be used."


def _opened(index: int) -> _Gpu:
    """Open a GPU, and ask what never changes; one that is gone has no handle."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError:
        return _Gpu(None, {})
    facts: dict[str, Any] = {}
    with contextlib.suppress(LostError):
        facts.update(constants(handle))  # what was told before it was lost stays
    return _Gpu(handle, facts)


def _rate(before_kib: int | None, now_kib: int | None, seconds: float) -> float | None:
    if before_kib is None or now_kib is None or now_kib < before_kib:
        return None
    return round((now_kib - before_kib) / 2**20 / seconds, 3)


LIMIT_SECONDS = 120.0  # without persistence mode eight GPUs take tens of seconds to wake
QUERY = [sys.executable, "-P", "-m", "refocused.monitor.sampler.gpu_reader"]

Capability = tuple[int, int]


def gpu_capabilities() -> list[Capability | None]:
    """Return the compute capability of each GPU of this machine; None: the GPU does not tell.

    Another process queries the driver: a driver that hangs takes its caller along. That process
    is not waited for, because SIGKILL may not end it either.

    Raises:
        NoGpusError: The driver is there and cannot be used.
        RefocusedError: It hangs.
    """
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
            f"The NVIDIA driver did not answer within {LIMIT_SECONDS:.0f} s. Run this "
            "again, restart the machine, or set run.device=cpu to train without GPUs."
        ) from None
    if query.returncode:
        raise NoGpusError(
            f"The NVIDIA driver does not answer: the query ended with code {query.returncode}. "
            "See what nvidia-smi says.",
            is_fault=True,
        )
    found = json.loads(answer)
    if "fault" in found:
        raise NoGpusError(found["fault"], is_fault=True)
    return [None if one is None else (one[0], one[1]) for one in found["capabilities"]]


def driver_versions() -> tuple[str | None, tuple[int, int] | None]:
    """Return the driver's version and the newest CUDA that it runs; None: it does not tell.

    `GpuReader` has opened the library.
    """
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    with contextlib.suppress(pynvml.NVMLError):
        driver = str(pynvml.nvmlSystemGetDriverVersion())
    with contextlib.suppress(pynvml.NVMLError):
        number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())  # 12080 is 12.8
        cuda = (number // 1000, number % 1000 // 10)
    return driver, cuda


def _answer() -> dict[str, Any]:
    """Query the driver in this process."""
    try:
        count = open_library()
    except NoGpusError as error:
        return {"fault": str(error)} if error.is_fault else {"capabilities": []}
    return {"capabilities": [_capability(index) for index in range(count)]}


def _capability(index: int) -> Capability | None:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return None
    return major, minor


if __name__ == "__main__":
    print(json.dumps(_answer()))
