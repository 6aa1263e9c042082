"""Counts where the host waits for the device in each step, by stage.

The device is the CPU behind an accelerator that claims streams of its own, as a GPU does, so that
DeepSpeed takes the paths of a GPU. Copies between memories cannot be seen so: of those, it counts
tensors made of Python's numbers on a device.
"""

import contextlib
import sys
from collections import Counter
from pathlib import Path
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
from deepspeed import accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from engine_cases import RATES, Case, sequences, start_engine
from ranks import on_ranks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from refocused.engine.finite_updates import Judge, Limits

CASES = [Case(stage, dtype=dtype) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")]
CHECKED = [(Case(1, dtype="bf16"), 1000), (Case(3), 1000)]  # for flipped bits
COUNTED_STEPS = 10
READS = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
}  # operators that return a value to the host
WAITS = Counter()


def note_wait(kind):
    """Count a wait under the calling function of DeepSpeed or of ours."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if ("/deepspeed/" in file or "/refocused/" in file) and "/accelerator/" not in file:
            break
        frame = frame.f_back
    WAITS[f"{kind} in {Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1


def fake_queue(kind):
    """A stream or an event of a device that is always behind the host."""
    queue = MagicMock()
    queue.synchronize.side_effect = lambda: note_wait(kind)
    queue.query.return_value = False
    queue.record_event.side_effect = lambda event=None: event or fake_queue("event")
    return queue


class FakeGpu(CPU_Accelerator):
    """The CPU with a device's queue."""

    _stream = fake_queue("stream")

    def is_synchronized_device(self):
        return False

    def synchronize(self, device_index=None):
        note_wait("device")

    def Stream(self, *args, **named):  # noqa: N802 - DeepSpeed's name
        return fake_queue("stream")

    def Event(self, *args, **named):  # noqa: N802 - DeepSpeed's name
        return fake_queue("event")

    def stream(self, stream):
        return contextlib.nullcontext()

    def current_stream(self, device_index=None):
        return self._stream

    default_stream = current_stream


class Copies(TorchFunctionMode):
    """Records what waits on a GPU only: tensors made of Python's values, and filled by tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        named = kwargs or {}
        makes = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor)
        if makes and named.get("device") is not None:
            note_wait("copy")
        value = named.get("value", args[-1] if args else None)
        if func.__name__.startswith("masked_fill") and isinstance(value, torch.Tensor):
            note_wait("read")
        return func(*args, **named)


class Reads(TorchDispatchMode):
    """Records operators whose result the host needs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.split(".")[0] in READS:
            note_wait("read")
        return func(*args, **(kwargs or {}))


def train(engine, world, *, steps):
    for step in range(steps):
        passes = sequences()[step % len(RATES), :, world.rank]
        engine.begin_step(len(passes))  # every fourth one is measured
        losses = [engine.accumulate(ids[:, :-1], ids[:, 1:]) for ids in passes]
        engine.update(RATES[step % len(RATES)], Judge(torch.stack(losses).mean(), Limits()))


@contextlib.contextmanager
def counted():
    WAITS.clear()
    with Reads(), Copies():
        yield


def measure(world):
    accelerator.set_accelerator(FakeGpu())
    torch.Tensor.record_stream = lambda *_: None
    found = {}
    for case, replay_every in [*((case, None) for case in CASES), *CHECKED]:
        engine = start_engine(case, world, replay_every=replay_every)
        train(engine, world, steps=3)  # the first steps record the order of weights
        figures = mock.patch.object(Judge, "figures", autospec=True, side_effect=Judge.figures)
        with counted(), figures as judged:  # each with an all-reduce
            train(engine, world, steps=COUNTED_STEPS)
        assert judged.call_count == COUNTED_STEPS, case.name
        found[f"{'checked-' if replay_every else ''}{case.name}"] = dict(WAITS)
        engine.close()
    return found


# Where a host may wait for its device between two lines of the log, and why.
NAMED = {
    # At most two buckets of gradients are in flight, to bound their memory. The device still
    # has the work of those two when the host waits.
    # Once a step, after the update, wait for all work: weights are gathered on a stream of
    # their own, which is not ordered after the update otherwise.
    "zero3": {
        "event in stage3.py:__reduce_and_partition_ipg_grads",
        "device in partition_parameters.py:_allgather_params_coalesced",
    },
    # DeepSpeed's 16-bit optimizer without ZeRO looks for overflows tensor by tensor. `auto` never
    # chooses this stage; stage 1 does the same without waiting.
    "bf16-zero0": {
        "read in utils.py:has_overflow_serial",
        "read in utils.py:has_overflow",
        "read in utils.py:get_weight_norm",
    },
}


@pytest.mark.slow
def test_the_host_waits_only_in_the_known_places(tmp_path):
    found, _ = on_ranks(measure, folder=tmp_path)
    assert len(found) == 10
    for case, waits in found.items():
        allowed = set().union(*(places for part, places in NAMED.items() if case.endswith(part)))
        assert set(waits) == allowed, case
