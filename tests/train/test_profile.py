import json
import types
from typing import Any

import pytest
import torch
from run_fakes import Clock
from torch._C._autograd import DeviceType

from refocused.train.step.profile import StepProfiler, idle_share


def traced(folder, *, steps, made):
    """Run some steps with a profiler; return its messages."""
    told: list[str] = []
    clock = Clock()
    profiler = StepProfiler(
        folder, steps=steps, on_gpu=False, report=told.append, clock=clock, warm_up_steps=2
    )
    for step in range(made):
        name = "warming" if step < 2 else "counted" if step < 2 + steps else "after"
        with torch.profiler.record_function(name):
            torch.ones(64, 64) @ torch.ones(64, 64)
        clock.now += 0.1
        profiler.after_step(0.02 * (step + 1))
    profiler.close()
    return told


def test_the_steps_after_the_warm_up_are_traced_and_no_others(tmp_path):
    (told,) = traced(tmp_path / "profile", steps=3, made=7)
    trace = json.loads((tmp_path / "profile" / "steps_3-5.trace.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("counted") == 3
    assert not {"warming", "after"} & {*names}
    assert told.startswith("3 steps, 0.1 s each while traced | data wait 20.0% | ")
    assert "aten::mm" in told
    table = (tmp_path / "profile" / "steps_3-5.txt").read_text().splitlines()
    assert table[1:] == told.splitlines()[1:]
    assert sum("aten::" in line for line in table) <= 10


@pytest.mark.parametrize("made", [0, 4])
def test_too_few_steps_write_no_trace_and_warn(tmp_path, made):
    (told,) = traced(tmp_path / "profile", steps=3, made=made)
    assert told == (
        f"not written: it takes 2 steps to warm up and 3 to trace; this session made {made}"
    )
    assert not (tmp_path / "profile").exists()


def event(begin, end, *, named=False):
    return types.SimpleNamespace(
        device_type=DeviceType.CUDA,
        is_user_annotation=named,
        time_range=types.SimpleNamespace(start=begin, end=end),
    )


def test_overlapping_kernels_count_once_and_ranges_not_at_all():
    kernels = [event(1e6 * b, 1e6 * e) for b, e in [(3, 4), (0, 2), (1, 2.5), (1.2, 1.4)]]
    events = [event(0, 5e6, named=True), *kernels]
    profiler: Any = types.SimpleNamespace(events=lambda: events)
    assert idle_share(profiler, 5.0) == pytest.approx(0.3)


@pytest.mark.gpu
def test_kernels_of_a_gpu_leave_some_time_idle(tmp_path):
    told: list[str] = []
    profiler = StepProfiler(tmp_path, steps=2, on_gpu=True, report=told.append, warm_up_steps=2)
    matrix = torch.ones(1024, 1024, device="cuda")
    for _ in range(4):
        matrix @ matrix
        profiler.after_step(0.0)
    assert "idle" in told[0] and "gemm" in told[0]
