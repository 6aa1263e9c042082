"""How long the passes and the update of each step take, where they are computed."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

PENDING_STEPS = 100  # further behind the host no device is: asking about older ones does not wait


class Moment(Protocol):
    """A point in the device's own order of work."""

    def seconds_until(self, later: Moment) -> float:
        """Return the time between two points, once both have passed."""


class HostMoment:
    """A point that has passed when it is noted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Note it, in seconds of a clock."""
        self._at = clock()

    def seconds_until(self, later: Moment) -> float:
        """Return the time between."""
        assert isinstance(later, HostMoment)
        return later._at - self._at


class CudaMoment:
    """A point in the GPU's queue, which the host does not wait for."""

    def __init__(self) -> None:
        """Put it into the current stream."""
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def seconds_until(self, later: Moment) -> float:
        """Return the time between, after waiting for the later one."""
        assert isinstance(later, CudaMoment)
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1000


class StepPhases:
    """Times the passes and the update of steps without waiting for the device."""

    def __init__(self, moment: Callable[[], Moment]) -> None:
        """Begin with nothing.

        Args:
            moment: Notes the present point.
        """
        self._moment = moment
        self._began = self._passed = moment()
        self._pending: collections.deque[tuple[Moment, Moment, Moment]] = collections.deque()
        self._sums = [0.0, 0.0]

    def begin(self) -> None:
        """Note that a step's first pass begins."""
        self._began = self._moment()

    def passes_made(self) -> None:
        """Note that a step's last pass is over, and its update begins."""
        self._passed = self._moment()

    def end(self) -> None:
        """Note that a step is over."""
        self._pending.append((self._began, self._passed, self._moment()))
        while len(self._pending) > PENDING_STEPS:
            self._add_oldest()

    def take(self) -> tuple[float, float]:
        """Return the seconds of passes and of updates since the last call; waits for the device."""
        while self._pending:
            self._add_oldest()
        passes, updates = self._sums
        self._sums = [0.0, 0.0]
        return passes, updates

    def _add_oldest(self) -> None:
        began, passed, ended = self._pending.popleft()
        self._sums[0] += began.seconds_until(passed)
        self._sums[1] += passed.seconds_until(ended)


def step_phases(device_kind: str, clock: Callable[[], float] = time.monotonic) -> StepPhases:
    """Return what times steps on `cuda`, or on the host."""
    return StepPhases(CudaMoment if device_kind == "cuda" else lambda: HostMoment(clock))
