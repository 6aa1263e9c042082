"""Trace a few steps, and list the operations that took most of their time."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from refocused.metrics.meter import WARM_UP_STEPS

ROWS = 10


class StepProfiler:
    """Traces some steps of this rank, after the warm-up steps."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        on_gpu: bool,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        warm_up_steps: int = WARM_UP_STEPS,
    ) -> None:
        """Prepare to trace after the warm-up: at least 2 steps, as the tracer itself needs one."""
        self._folder, self._steps, self._on_gpu = folder, steps, on_gpu
        self._report, self._clock, self._warm_up = report, clock, warm_up_steps
        self._done = 0
        self._began = self._ended = self._waited_before = self._waited = 0.0
        self._profiler: torch.profiler.profile | None = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            schedule=torch.profiler.schedule(
                wait=warm_up_steps - 1, warmup=1, active=steps, repeat=1
            ),
            on_trace_ready=self._write,
            acc_events=True,
        )
        self._profiler.start()

    def after_step(self, waited_seconds: float) -> None:
        """Count a step; `waited_seconds` for batches are counted since the session began."""
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
        """Stop; an incomplete trace is reported, not written."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            steps, self._steps = self._steps, 0  # do not write the incomplete trace
            profiler.stop()
            self._report(
                f"not written: it takes {self._warm_up:,} steps to warm up and {steps} to trace; "
                f"this session made {self._done}"
            )

    def _write(self, profiler: torch.profiler.profile) -> None:
        if not self._steps:
            return
        seconds, waited = self._ended - self._began, self._waited - self._waited_before
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"steps_{self._warm_up + 1}-{self._warm_up + self._steps}"
        trace = self._folder / f"{name}.trace.json"
        profiler.export_chrome_trace(str(trace))
        idle = f"idle {idle_share(profiler, seconds):.1%} | " if self._on_gpu else ""
        head = (
            f"{self._steps:,} steps, {seconds / self._steps:.3g} s each while traced | {idle}"
            f"data wait {min(1.0, waited / seconds):.1%}"
        )
        order = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=ROWS).rstrip()
        (self._folder / f"{name}.txt").write_text(f"{head}\n{table}\n")
        self._report(f"{head} | {trace}\n{table}")


def idle_share(profiler: torch.profiler.profile, seconds: float) -> float:
    """Return the share of the time of a trace in which no kernel or copy ran on the GPU."""
    busy_us, reached_us = 0.0, float("-inf")
    times = (
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()  # type: ignore[no-untyped-call]
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    for begin, end in sorted(times):  # kernels of several streams overlap
        busy_us += max(0.0, end - max(begin, reached_us))
        reached_us = max(reached_us, end)
    return max(0.0, 1 - busy_us / 1e6 / seconds)
