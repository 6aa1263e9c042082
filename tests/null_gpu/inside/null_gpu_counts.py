"""Counts, in a rank on the null GPU, what the host waits for, and ignores what was computed.

Between the lines of the log it counts where the host waits for the device, and copies from and to
pageable memory; over the whole run, the graphs that were compiled and the compiler's processes.
"""

import contextlib
import ctypes
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

KINDS = ["stream", "device", "event", "copy", "pageable"]  # as in runtime.c
WARM_UP_STEPS = 3  # compile, record the order of weights, fill caches
LIBRARY = ("/torch/", "/deepspeed/accelerator/", "/null_gpu_counts.py")  # its caller is the place
# Work whose end the host waits for late, while the device has more to do: an update, while the next
# step is queued; a bucket of gradients, while two others are in flight.
LATE = {
    "event in finite_updates.py:was_finite",
    "event in stage3.py:__reduce_and_partition_ipg_grads",
}


class Counts:
    """Counts calls of the runtime by the function of refocused or DeepSpeed that makes them."""

    def __init__(self) -> None:
        self.steps = self.counted_steps = self.late_graphs = 0
        self.places: Counter[str] = Counter()
        self._runtime = ctypes.CDLL(None)
        self._listener = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_size_t)(self._note)
        self._is_on = False

    def count(self, on: bool) -> None:
        """Begin or end to count."""
        if on != self._is_on:
            self._is_on = on
            self._runtime.null_gpu_listen(self._listener if on else None)

    def _note(self, kind: int, size: int) -> None:
        thread = threading.current_thread()
        is_trainer = thread.name == "MainThread" or thread.name.startswith("Dummy")  # autograd's
        if KINDS[kind] != "pageable" and not is_trainer:
            return  # a background thread may wait
        frame, place = sys._getframe(1), "autograd"  # unless a function in Python called it
        while frame is not None:
            code = frame.f_code
            if not any(part in code.co_filename for part in LIBRARY):
                place = f"{Path(code.co_filename).name}:{code.co_name}"
                break
            frame = frame.f_back
        self.places[f"{KINDS[kind]} in {place}"] += 1
        if os.environ.get("NULL_GPU_STACKS"):
            print(f"null GPU: {KINDS[kind]} {size}", file=sys.stderr)
            traceback.print_stack(file=sys.stderr)

    def graphs(self) -> int:
        """Return how many graphs were compiled so far."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0

    def report(self) -> dict[str, Any]:
        """Return all figures, those of places for each step."""
        import psutil

        children = psutil.Process().children(recursive=True)
        lines = [" ".join(child.cmdline()) for child in children if child.is_running()]
        late = sum(number for place, number in self.places.items() if place in LATE)
        each = {place: number / max(1, self.counted_steps) for place, number in self.places.items()}
        pageable = {place: each.pop(place) for place in list(each) if place.startswith("pageable")}
        return {
            "steps": self.steps,
            "counted_steps": self.counted_steps,
            "waits": {place: number for place, number in each.items() if place not in LATE},
            "late": late / max(1, self.counted_steps),
            "copies": pageable,
            "graphs": self.graphs(),
            "late_graphs": self.late_graphs,
            "workers": sum("compile_worker" in line for line in lines),
        }


def count_steps(counts: Counts) -> None:
    """Count from the fourth step on, but not what happens where a line of the log is due."""
    from refocused.train.step import loop, reporter, saver

    take_step = loop.take_step

    def counted_step(*args: Any, **named: Any) -> Any:
        counts.steps += 1
        graphs = counts.graphs()
        counts.count(counts.steps > WARM_UP_STEPS)
        taken = take_step(*args, **named)
        if counts.steps > WARM_UP_STEPS:
            counts.counted_steps += 1
            counts.late_graphs += counts.graphs() - graphs
        return taken

    def uncounted(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def paused(*args: Any, **named: Any) -> Any:
            counts.count(False)
            return plain(*args, **named)

        setattr(owner, name, paused)

    loop.take_step = counted_step
    for owner, name in (
        (reporter.Reporter, "step"),
        (loop, "evaluate"),
        (saver.Saver, "save"),
        (loop.Outcome, "__init__"),
    ):
        uncounted(owner, name)


def ignore_numbers() -> None:
    """Switch off the checks of values, which are whatever the memory held."""
    from refocused.engine import bit_checks, finite_updates
    from refocused.train.lifecycle import trial
    from refocused.train.step import loss_check

    measure_allreduce = trial.measure_allreduce
    trial.measure_allreduce = lambda world: measure_allreduce(world) | {"is_right": True}
    loss_of, was_finite = loss_check.loss_on_random_tokens, finite_updates.UpdateOutcome.was_finite
    figures = finite_updates.UpdateOutcome.figures

    def expected_loss(parts: Any, **named: Any) -> Any:
        loss_of(parts, **named)
        return parts.untrained_loss

    def finite(outcome: Any) -> bool:
        was_finite(outcome)
        return True

    def usual(outcome: Any) -> Any:
        return figures(outcome) and finite_updates.Figures(1.0, 1.0, 0.0, 0.0)

    loss_check.loss_on_random_tokens = expected_loss
    finite_updates.UpdateOutcome.was_finite = finite
    finite_updates.UpdateOutcome.figures = usual
    failed = bit_checks.BitChecks.failed

    def unchanged(checks: Any, *args: Any) -> bool:
        failed(checks, *args)
        return False

    bit_checks.BitChecks.failed = unchanged
    bit_checks.BitChecks.explain = lambda checks, updates: None


def prepare() -> None:
    """Count until this process exits, and write the figures into the folder NULL_GPU_REPORTS."""
    began, counts, exit_now = time.monotonic(), Counts(), os._exit
    file = Path(os.environ["NULL_GPU_REPORTS"], f"{time.time_ns()}.json")

    def exit_with_report(code: int) -> None:  # how a rank ends
        with contextlib.suppress(OSError):
            figures = counts.report() | {"seconds": round(time.monotonic() - began, 1)}
            file.write_text(json.dumps(figures))
        exit_now(code)

    os._exit = exit_with_report
    exception = logging.Logger.exception

    def with_traceback(*args: Any, **named: Any) -> None:  # the screen may show its first line only
        traceback.print_exc()
        exception(*args, **named)

    logging.Logger.exception = with_traceback
    import torch

    from refocused.train.lifecycle import launch_session

    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN supports nothing here
    launch_session.write_summary = lambda run: ""  # takes seconds, and no GPU
    ignore_numbers()
    count_steps(counts)
