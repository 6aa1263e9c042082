"""Counts, in a rank on the null GPU, what the host waits for, and ignores what was computed.

Between the lines of the log it counts where the host waits for the device, and copies from and to
pageable memory; over the whole run, the graphs that were compiled and the compiler's processes.
`PATCHES` has a function for each changed module, called once that was imported.
"""

import contextlib
import ctypes
import itertools
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

KINDS = ["stream", "device", "event", "copy", "pageable"]  # as in runtime.c
WARM_UP_STEPS = 3  # compile, record the order of weights, fill caches
LIBRARY = ("/torch/", "/deepspeed/accelerator/", "/null_gpu_patches.py")  # its caller is the place
# Work whose end the host waits for late, while the device has more to do: an update, while the next
# step is queued; a bucket of gradients, while two others are in flight.
LATE = {
    "event in finite_updates.py:was_finite",
    "event in stage3.py:__reduce_and_partition_ipg_grads",
}


class Counts:
    """Counts calls of the runtime by the function in Python that makes them."""

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
        """Return all figures; those of places are for each step."""
        import psutil

        children = psutil.Process().children(recursive=True)
        lines = [" ".join(child.cmdline()) for child in children if child.is_running()]
        each = {place: number / max(1, self.counted_steps) for place, number in self.places.items()}
        copies = {place: each.pop(place) for place in list(each) if place.startswith("pageable")}
        return {
            "counted_steps": self.counted_steps,
            "waits": {place: number for place, number in each.items() if place not in LATE},
            "copies": copies,
            "graphs": self.graphs(),
            "late_graphs": self.late_graphs,
            "workers": sum("compile_worker" in line for line in lines),
        }


COUNTS = Counts()


def paused(owner: Any, name: str) -> None:
    """Let a function end the counting until the next step."""
    plain = getattr(owner, name)

    def uncounted(*args: Any, **named: Any) -> Any:
        COUNTS.count(False)
        return plain(*args, **named)

    setattr(owner, name, uncounted)


def patch_loop(loop: ModuleType) -> None:
    """Count from the fourth step on, and report when the rank ends."""
    take_step, exit_now = loop.take_step, os._exit

    def counted_step(*args: Any, **named: Any) -> Any:
        COUNTS.steps += 1
        is_warm, graphs = COUNTS.steps > WARM_UP_STEPS, COUNTS.graphs()
        COUNTS.count(is_warm)
        taken = take_step(*args, **named)
        COUNTS.counted_steps += is_warm
        COUNTS.late_graphs += is_warm * (COUNTS.graphs() - graphs)
        return taken

    def exit_with_report(code: int) -> None:  # how a rank ends
        file = Path(os.environ["NULL_GPU_REPORTS"], f"{time.time_ns()}.json")
        with contextlib.suppress(OSError):
            file.write_text(json.dumps(COUNTS.report()))
        exit_now(code)

    loop.take_step, os._exit = counted_step, exit_with_report
    paused(loop, "evaluate")


def patch_backends(cuda: ModuleType) -> None:
    """Turn cuDNN off, which supports nothing here."""
    cuda.enable_cudnn_sdp(False)


def patch_export(export: ModuleType) -> None:
    """Do not compare what is exported, on the CPU: weights may be NaN, which equals nothing."""
    export.largest_difference = lambda *args, **named: 0.0


def patch_finite_updates(finite_updates: ModuleType) -> None:
    """Take each update for a usual one."""
    outcome = finite_updates.UpdateOutcome
    was_finite, figures = outcome.was_finite, outcome.figures
    usual = finite_updates.Figures(1.0, 1.0, 0.0, 0.0)
    outcome.was_finite = lambda self: was_finite(self) or True
    outcome.figures = lambda self: figures(self) and usual


def patch_bit_checks(bit_checks: ModuleType) -> None:
    """Make all comparisons, and ignore their results."""
    checks = bit_checks.BitChecks
    failed = checks.failed
    checks.failed = lambda self, *args: failed(self, *args) and False
    checks.explain = lambda self, updates: None


def patch_resume(resume: ModuleType) -> None:
    """Compute the first loss, and take the expected one for it."""
    computed = resume.loss_on_random_tokens

    def expected(trainer: Any, **named: Any) -> Any:
        computed(trainer, **named)
        return resume.expected_first_loss(trainer)[1]

    resume.loss_on_random_tokens = expected


def patch_trial(trial: ModuleType) -> None:
    """Take the doctor's sum over ranks for right."""
    measured = trial.measure_allreduce
    trial.measure_allreduce = lambda world: measured(world) | {"is_right": True}


def patch_generation(utils: ModuleType) -> None:
    """End each generation after 3 tokens: the device would compute whether a text has ended."""
    calls = itertools.count(1)
    utils.GenerationMixin._has_unfinished_sequences = lambda *args, **named: next(calls) % 4 > 0


def patch_kernel_errors(kernel_errors: ModuleType) -> None:
    """Compute what the certificate compares, and take it for right."""
    computed = kernel_errors.errors_of
    kernel_errors.errors_of = lambda *args: [0.0 for _ in computed(*args)]


def patch_launch_session(launch_session: ModuleType) -> None:
    """Write no summary, which takes seconds and no GPU; print unexpected errors whole."""
    launch_session.write_summary = lambda run: ""
    exception = logging.Logger.exception

    def with_traceback(*args: Any, **named: Any) -> None:
        traceback.print_exc()
        exception(*args, **named)

    logging.Logger.exception = with_traceback  # type: ignore[method-assign]


PATCHES = {
    "kernel_errors": patch_kernel_errors,
    "refocused.engine.bit_checks": patch_bit_checks,
    "refocused.engine.finite_updates": patch_finite_updates,
    "refocused.evaluate.export": patch_export,
    "refocused.train.lifecycle.launch_session": patch_launch_session,
    "refocused.train.lifecycle.resume": patch_resume,
    "refocused.train.lifecycle.trial": patch_trial,
    "refocused.train.step.loop": patch_loop,
    "refocused.train.step.profile": lambda profile: paused(profile.StepProfiler, "after_step"),
    "refocused.train.step.reporter": lambda reporter: paused(reporter.Reporter, "step"),
    "refocused.train.step.saver": lambda saver: paused(saver.Saver, "save"),
    "torch.backends.cuda": patch_backends,
    "transformers.generation.utils": patch_generation,
}
