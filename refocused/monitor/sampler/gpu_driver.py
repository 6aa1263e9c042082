"""What NVIDIA's driver says of itself and of its GPUs, also where it may hang."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

import pynvml

from refocused.monitor.sampler.gpu_reader import NoGpusError, open_library
from refocused.system.errors import RefocusedError

LIMIT_SECONDS = 120.0  # without persistence mode eight GPUs take tens of seconds to wake
QUERY = [sys.executable, "-P", "-m", "refocused.monitor.sampler.gpu_driver"]

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
