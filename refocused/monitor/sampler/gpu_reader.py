"""Read the GPUs of a machine through NVML."""

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

SLOW_SECONDS = 30.0  # between queries of values that rarely change, are many, or are means
LIMIT_SECONDS = 120.0  # without persistence mode eight GPUs take tens of seconds to wake up
QUERY = [sys.executable, "-P", "-m", "refocused.monitor.sampler.gpu_reader"]

Identity = tuple[str | None, str | None]  # UUID and name of a GPU; None: unknown
Capability = tuple[int, int]


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
        self._gpus = [_opened(index) for index in range(open_library())]
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
        facts.update(constants(handle))  # keeps what was read before the GPU was lost
    return handle, facts


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
    """Return the compute capability of each GPU of this machine; None: unknown.

    A child process queries the driver, since a hanging driver blocks its caller. After the time
    limit the child is abandoned: even SIGKILL may not end it.

    Raises:
        NoGpusError: The driver is installed and cannot be used.
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
            f"The NVIDIA driver did not answer within {LIMIT_SECONDS:.0f} s. Try again, restart "
            "the machine, or train without GPUs (run.device=cpu)."
        ) from None
    if query.returncode:
        text = f"The NVIDIA driver does not answer: the query exited with {query.returncode}. "
        raise NoGpusError(f"{text}Check the output of nvidia-smi.", is_fault=True)
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
