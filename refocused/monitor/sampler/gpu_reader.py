"""Read the GPUs of a machine through NVML."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pynvml

from refocused.monitor.readings import GpuSample, Rates
from refocused.monitor.sampler.nvml_fields import (
    LostError,
    answer,
    constants,
    health,
    link_traffic_gib,
    measured,
)
from refocused.system.errors import RefocusedError

SLOW_SECONDS = 30.0  # between queries of what rarely changes, is many values or a mean
LIMIT_SECONDS = 120.0  # without persistence mode eight GPUs take tens of seconds to wake
QUERY = [sys.executable, "-P", "-m", "refocused.monitor.sampler.gpu_reader"]

Identity = tuple[str | None, str | None]  # UUID and name of a GPU; None: unknown
Capability = tuple[int, int]


class NoGpusError(RefocusedError):
    """NVIDIA's library cannot be used; the text says why, and what to do about a fault."""

    def __init__(self, text: str, *, is_fault: bool) -> None:
        super().__init__(text)
        self.is_fault = is_fault  # there should be GPUs; without a driver at all there are none


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
        """Open the library, and query what does not change.

        `visible` and `cuda_order` are CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER of the `ranks` on
        this machine; the clock gives monotonic seconds.

        Raises:
            NoGpusError: As `open_library`.
        """
        self._clock = clock
        # By index: NVML's handle (None: lost before it could be opened), and constant fields.
        self._gpus = [_opened(index) for index in range(open_library())]
        names = [(facts.get("uuid"), facts.get("name")) for _, facts in self._gpus]
        devices = visible_devices(names, visible=visible, cuda_order=cuda_order)[:ranks]
        owners = {index: rank for rank, index in enumerate(devices)}  # rank N has CUDA's device N
        for index, (_, facts) in enumerate(self._gpus):
            facts |= {"host": host, "index": index, "local_rank": owners.get(index)}
        self._slow_values: dict[int, tuple[float, Mapping[str, Any]]] = {}
        self._traffic = collections.defaultdict[int, Rates](Rates)

    @property
    def count(self) -> int:
        """How many GPUs there were when the library was opened."""
        return len(self._gpus)

    def samples(self) -> list[GpuSample]:
        """Return a sample of each GPU now, in NVML's order."""
        return [self._sample(handle, facts) for handle, facts in self._gpus]

    def close(self) -> None:
        """Close the library."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()

    def _sample(self, handle: Any, facts: Mapping[str, Any]) -> GpuSample:
        if handle is None:
            return GpuSample(**facts, lost=True)
        try:
            return GpuSample(**facts, **measured(handle), **self._slow(handle, facts))
        except LostError:
            self._slow_values.pop(facts["index"], None)
            return GpuSample(**facts, lost=True)

    def _slow(self, handle: Any, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        now, index = self._clock(), facts["index"]
        if index in self._slow_values and now - self._slow_values[index][0] < SLOW_SECONDS:
            return self._slow_values[index][1]
        links = facts.get("nvlinks_total") or 0
        values = health(handle, links)
        if links:
            sent, received = self._traffic[index].since_last(now, link_traffic_gib(handle))
            values["nvlink_sent_gib_per_second"] = sent
            values["nvlink_received_gib_per_second"] = received
        self._slow_values[index] = now, values
        return values


def _opened(index: int) -> tuple[Any, dict[str, Any]]:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError:
        return None, {}
    facts: dict[str, Any] = {}
    with contextlib.suppress(LostError):
        facts.update(constants(handle))  # what was answered before it was lost stays
    return handle, facts


def visible_devices(
    gpus: Sequence[Identity], *, visible: str | None, cuda_order: str | None
) -> list[int | None]:
    """Return NVML's number of each of CUDA's devices; None: which one it is cannot be known.

    NVML numbers GPUs in the order of the PCI bus. CUDA does so too with CUDA_DEVICE_ORDER set to
    PCI_BUS_ID; else it begins with the fastest, which is the same order when all are of one kind.
    A word of CUDA_VISIBLE_DEVICES (`visible`) is a number or the beginning of one UUID; CUDA
    ignores what follows a word that names no GPU, and a GPU that is named twice hides all.
    """
    kinds = {name for _, name in gpus if name is not None}
    same_order = cuda_order == "PCI_BUS_ID" or len(kinds) <= 1
    if visible is None:
        return [index if same_order else None for index in range(len(gpus))]
    found: list[int | None] = []
    for word in (part.strip() for part in visible.split(",")):
        named = [index for index, (uuid, _) in enumerate(gpus) if (uuid or "").startswith(word)]
        if word.isdecimal() and int(word) < len(gpus):
            found.append(int(word) if same_order else None)
        elif word.startswith("GPU-") and len(named) == 1:
            found.append(named[0])
        else:
            break
    known = [index for index in found if index is not None]
    return [] if len(set(known)) < len(known) else found


def open_library() -> int:
    """Open NVIDIA's library; return how many GPUs it knows.

    Raises:
        NoGpusError: There is no driver, or it does not answer.
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
        what = {
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "its library and its kernel module are of "
            "different versions, as after an update without a restart. Restart the machine",
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "its kernel module is not loaded. Restart the "
            "machine, or install the driver again",
            pynvml.NVML_ERROR_NO_PERMISSION: "this user may not open it. Give it access to "
            "/dev/nvidiactl",
        }.get(error.value, f"{error}. See what nvidia-smi says")
        raise NoGpusError(
            f"The NVIDIA driver does not answer: {what}. Until then no GPU can be used.",
            is_fault=True,
        ) from error


def driver_versions() -> tuple[str | None, tuple[int, int] | None]:
    """Return the driver's version and the newest CUDA that it runs; None: unknown.

    The library must be open.
    """
    driver = answer(pynvml.nvmlSystemGetDriverVersion)
    number = answer(pynvml.nvmlSystemGetCudaDriverVersion_v2)  # 12080 is 12.8
    return driver, None if number is None else (number // 1000, number % 1000 // 10)


def gpu_capabilities() -> list[Capability | None]:
    """Return the compute capability of each GPU of this machine; None: unknown.

    Another process queries the driver, since a driver that hangs takes its caller along. After the
    time limit that process is abandoned: SIGKILL may not end it either.

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


def _query_driver() -> dict[str, Any]:
    try:
        found: list[Capability | None] = [None] * open_library()
    except NoGpusError as error:
        return {"fault": str(error)} if error.is_fault else {"capabilities": []}
    for index in range(len(found)):
        with contextlib.suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found[index] = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return {"capabilities": found}


if __name__ == "__main__":
    print(json.dumps(_query_driver()))
