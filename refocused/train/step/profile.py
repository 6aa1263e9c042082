"""A trace of a few steps, and the table that says where their time went."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from refocused.metrics.throughput import WARM_UP_STEPS

ROWS = 10
_NAME_WIDTH = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """What one kernel (on a GPU) or operator (on a CPU) took in all steps, without what it called.

    Attributes:
        name: As the profiler calls it.
        calls: How often it ran.
        seconds: In all.
    """

    name: str
    calls: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of some steps went, on rank 0.

    Attributes:
        steps: Steps that were traced.
        seconds: From the first to the end of the last, with a validation or save between them;
            tracing makes them longer.
        operations: All operations, the longest first.
        idle_fraction: Share of the time in which no kernel ran; None without a GPU.
        wait_fraction: Share of the time that batches were waited for.
    """

    steps: int
    seconds: float
    operations: Sequence[Operation]
    idle_fraction: float | None
    wait_fraction: float

    def lines(self) -> list[str]:
        """Return the table that a person reads."""
        total = sum(operation.seconds for operation in self.operations) or 1.0
        idle = "" if self.idle_fraction is None else f"idle {self.idle_fraction:.1%} | "
        head = (
            f"{self.steps} steps, {self.seconds / self.steps:.3g} s each while traced | {idle}"
            f"data wait {self.wait_fraction:.1%}"
        )
        rows = [
            f"{operation.seconds / total:6.1%} {1000 * operation.seconds / self.steps:10.3f} "
            f"{operation.calls / self.steps:8.1f}  {operation.name[:_NAME_WIDTH]}"
            for operation in self.operations[:ROWS]
        ]
        return [head, " share    ms/step    calls  operation", *rows]


class StepProfiler:
    """Traces a number of steps of this rank, after those that warm everything up."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        on_gpu: bool,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        warm_up_steps: int = WARM_UP_STEPS,
    ) -> None:
        """Prepare; nothing is traced before the warm-up is over.

        Args:
            folder: Where the trace goes.
            steps: Steps to trace, at least 1.
            on_gpu: Whether kernels run on a GPU.
            tell: Takes the table, as one text.
            clock: Monotonic seconds.
            warm_up_steps: Steps before the trace, at least 2: the tracer needs one itself.
        """
        self._folder, self._steps, self._on_gpu = folder, steps, on_gpu
        self._tell, self._clock, self._warm_up = tell, clock, warm_up_steps
        self._done = 0
        self._began = self._ended = self._waited_before = self._waited = 0.0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profiler: torch.profiler.profile | None = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(
                wait=warm_up_steps - 1, warmup=1, active=steps, repeat=1
            ),
            on_trace_ready=self._write,
            acc_events=True,
        )
        self._profiler.start()

    def after_step(self, waited_seconds: float) -> None:
        """Note that a step is over.

        Args:
            waited_seconds: Time that batches were waited for since the session began.
        """
        if self._profiler is None:
            return
        self._done += 1
        self._waited = waited_seconds
        if self._on_gpu and self._done in (self._warm_up, self._warm_up + self._steps):
            torch.cuda.synchronize()  # the last step's kernels belong to it
        profiler, self._ended = self._profiler, self._clock()
        if self._done == self._warm_up + self._steps:
            self._profiler = None
        profiler.step()
        if self._done == self._warm_up:
            self._began, self._waited_before = self._clock(), waited_seconds
        if self._profiler is None:
            profiler.stop()

    def close(self) -> None:
        """Stop; a trace that is not complete is not written, which is said."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            wanted, self._steps = self._steps, 0  # what it hands over now is not written
            profiler.stop()
            self._tell(
                f"not written: it takes {self._warm_up} steps to warm up and {wanted} to trace; "
                f"this session made {self._done}"
            )

    def _write(self, profiler: torch.profiler.profile) -> None:
        if not self._steps:
            return
        seconds = self._ended - self._began
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"steps_{self._warm_up + 1}-{self._warm_up + self._steps}"
        trace = self._folder / f"{name}.trace.json"
        profiler.export_chrome_trace(str(trace))
        found = Profile(
            steps=self._steps,
            seconds=seconds,
            operations=_operations(profiler, on_gpu=self._on_gpu),
            idle_fraction=idle_share(profiler, seconds) if self._on_gpu else None,
            wait_fraction=min(1.0, (self._waited - self._waited_before) / seconds),
        )
        lines = found.lines()
        (self._folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
        self._tell("\n".join([f"{lines[0]} | {trace}", *lines[1:]]))


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the time that at least one of some intervals (begin, end) covers."""
    busy, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > reached:
            busy += end - max(begin, reached)
            reached = end
    return busy


def _operations(profiler: torch.profiler.profile, *, on_gpu: bool) -> list[Operation]:
    """Return what was traced, by name: kernels on a GPU, operators on a CPU."""
    found = []
    for event in profiler.key_averages():
        if on_gpu and _is_kernel(event):
            microseconds = event.self_device_time_total
        elif not on_gpu:
            microseconds = event.self_cpu_time_total
        else:
            continue
        if not event.key.startswith("ProfilerStep"):
            found.append(Operation(event.key, event.count, microseconds / 1e6))
    return sorted(found, key=lambda operation: -operation.seconds)


def idle_share(profiler: torch.profiler.profile, seconds: float) -> float:
    """Return the share of the time of a trace in which no kernel ran."""
    kernels = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events() or ()  # type: ignore[no-untyped-call]
        if _is_kernel(event)
    ]
    return max(0.0, 1 - busy_seconds(kernels) / seconds)


def _is_kernel(event: Any) -> bool:
    """Tell kernels and copies of a GPU from ranges that somebody named, which cover the gaps."""
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation
