"""The versions of NVIDIA's driver."""

from __future__ import annotations

import contextlib

import pynvml


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
