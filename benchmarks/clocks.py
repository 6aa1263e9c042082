"""How long a step takes: in CPU time, or between two events in a GPU's queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Tells milliseconds between two places of a loop."""

    def begin(self) -> None:
        """Note the first place."""

    def end(self) -> float:
        """Return the milliseconds since then."""


class CpuClock:
    """CPU time of this process, all threads together: other programs do not count."""

    def begin(self) -> None:
        """Note the first place."""
        self._began = time.process_time()

    def end(self) -> float:
        """Return the milliseconds since then."""
        return (time.process_time() - self._began) * 1000


class DeviceClock:
    """Time between two events in the GPU's queue, so that waiting for the host counts as well."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """Prepare the events; `cuda` stands for torch's module of that name."""
        self._cuda = cuda
        self._first, self._last = (cuda.Event(enable_timing=True) for _ in range(2))

    def begin(self) -> None:
        """Let the queue run empty, then note the first place."""
        self._cuda.synchronize()
        self._first.record()

    def end(self) -> float:
        """Wait for the device, and return the milliseconds since then."""
        self._last.record()
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last))


def clock_of(device: torch.device) -> Clock:
    """Return the clock that is right for a device."""
    return DeviceClock() if device.type == "cuda" else CpuClock()


def timed_ms(clock: Clock, call: Callable[[], Any]) -> float:
    """Return the milliseconds of a call."""
    clock.begin()
    call()
    return clock.end()
