"""Non-finite losses and gradients, and running out of memory."""

import ctypes
import gc
import math
import types
import weakref

import pytest
import torch
from run_fakes import FakeEngine, FakeLoader, Log, happened, rate, trainer_of
from thread_ranks import on_two_ranks

from refocused.config.batch_plan import BatchPlan
from refocused.config.cadence import Cadence
from refocused.estimate.memory_plan import HostPlan
from refocused.system.errors import TrainingError
from refocused.system.world import World
from refocused.train.step.garbage_collection import (
    WARM_STEPS,
    Garbage,
    keep_freed_memory,
    quick_imports,
)
from refocused.train.step.guards import explaining_lack_of_memory
from refocused.train.step.loop import train
from refocused.train.step.state import TrainState


def test_a_non_finite_loss_on_one_rank_stops_both():
    logs: list[Log] = [[], []]

    def action(world):
        log = logs[world.rank]
        engine = FakeEngine(
            log,
            training_loss=lambda step: math.nan if (step, world.rank) == (2, 1) else 1.0,
            refuses_from=2,
        )
        cadence = Cadence(log=1, validation=2, checkpoint=2)
        train(trainer_of(log, world=world, engine=engine, cadence=cadence), TrainState())

    for ended, log in zip(on_two_ranks(action), logs, strict=True):
        assert isinstance(ended.error, TrainingError)
        assert ended.error.on_every_rank
        message = str(ended.error)
        assert "Loss is not finite on rank 1 at step 2 (a.npy sequence 2; a.npy seq" in message
        assert "before the optimizer step" in message and "lower optimizer.lr" in message
        refused = ["accumulate 2", "accumulate 3", "refuse", "close"]
        assert log[2:] == [rate(0, 6), "report 1", *refused]


def run_refused(cadence=None, **engine):
    """Train with an engine that skips the third update; return the log and the error."""
    log: Log = []
    fake = FakeEngine(log, refuses_from=3, **engine)
    try:
        train(trainer_of(log, engine=fake, cadence=cadence), TrainState())
    except TrainingError as error:
        return log, [str(error)]
    return log, []


def test_a_skipped_update_is_found_during_the_next_step():
    log, [message] = run_refused()
    assert (
        "Gradient is not finite on rank 0 at step 3 (a.npy sequence 4; a.npy sequence 5)" in message
    )
    assert happened(log, "update", "refuse") == [rate(0, 6), rate(1, 6), "refuse", "refuse"]
    assert log[-1] == "close"


@pytest.mark.parametrize("due", ["log", "validation", "checkpoint"])
def test_a_step_is_checked_before_it_is_logged_validated_or_saved(due):
    log, [message] = run_refused(Cadence(**{"log": 0, "validation": 0, "checkpoint": 0, due: 3}))
    assert "at step 3 " in message
    assert log[-2:] == ["refuse", "close"]


def test_a_step_is_checked_before_the_wait_for_data():
    log: Log = []
    engine = FakeEngine(log, refuses_from=2)
    loader = FakeLoader(log, missing_from=4)
    trainer = trainer_of(log, engine=engine, loader=loader, stop_when="waits")
    with pytest.raises(TrainingError, match="not finite on rank 0 at step 2"):
        train(trainer, TrainState())
    assert not happened(log, "save")


def test_an_fp16_overflow_does_not_stop_training():
    log, raised = run_refused(scale=65536.0)
    assert not raised
    assert log.count("refuse") == 4
    log, [message] = run_refused(
        scale=65536.0, training_loss=lambda step: math.nan if step == 4 else 1.0
    )
    assert "Loss is not finite on rank 0 at step 4" in message


def test_running_out_of_memory_is_explained():
    plan = BatchPlan(
        micro_batch_size=8, gradient_accumulation_steps=16, world_size=4, sequence_length=2048
    )
    with (
        pytest.raises(TrainingError) as raised,
        explaining_lack_of_memory(plan, world=World(), step=7),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert str(raised.value).startswith(
        "Out of GPU memory on rank 0 at step 7 (0 B of 0 B). Micro batch 8 x 2048 tokens. Try "
        "batch.micro_batch_size=4 (same tokens a step, 32 accumulation steps: with "
        "batch.gradient_accumulation_steps in the run file set that too) or "
        "model.activation_checkpointing=true."
    )


PLAN = HostPlan(building=0, tensors=0, copies=10**9, processes=0, temporaries=2 * 10**9)


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()


class Node:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self):
        self.me = self


def dropped():
    return weakref.ref(Node())


def test_after_the_warm_up_garbage_is_collected_by_the_loop():
    with pytest.raises(ValueError, match="stop"), Garbage() as garbage:
        for _ in range(WARM_STEPS - 1):
            garbage.step()
        assert gc.isenabled()
        garbage.step()
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        cycle = dropped()
        gc_runs = [generation["collections"] for generation in gc.get_stats()]
        _ = [Node() for _ in range(5000)]
        assert [generation["collections"] for generation in gc.get_stats()] == gc_runs
        assert cycle() is not None
        garbage.collect()
        assert cycle() is None
        raise ValueError("stop")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_imports_are_not_collected_and_the_collector_is_then_as_before():
    with pytest.raises(ImportError), quick_imports():
        assert not gc.isenabled()
        imported: list[object] = [[]]
        raise ImportError
    assert gc.isenabled()
    later: list[object] = [[]]
    walked = gc.get_objects()
    assert not any(one is imported for one in walked)
    assert any(one is later for one in walked)
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


ROOM = 9 * 10**9


@pytest.mark.parametrize(
    ("available", "settings", "plan", "said", "calls"),
    [
        # At most a rank's share of what is left stays at the heap's end; -1 is without a limit.
        (ROOM, {"LD_PRELOAD": "libtrace.so"}, PLAN, "kept", [(-4, 0), (-1, 10**9)]),
        (10**12, {}, PLAN, "kept", [(-4, 0), (-1, -1)]),
        (ROOM - 2 * 10**9, {}, PLAN, "returned (keeping it takes 7.0 GB)", []),
        (ROOM, {}, HostPlan(0, 0, 0, 0, temporaries=0), "", []),
        (ROOM, {"MALLOC_MMAP_MAX_": "1"}, PLAN, "as MALLOC_MMAP_MAX_ says", []),
        (ROOM, {"GLIBC_TUNABLES": "glibc.malloc.x=1"}, PLAN, "as GLIBC_TUNABLES says", []),
        (ROOM, {"LD_PRELOAD": "/lib/libjemalloc.so.2"}, PLAN, "as LD_PRELOAD says", []),
    ],
)
def test_freed_memory_is_kept_if_there_is_room(available, settings, plan, said, calls, monkeypatch):
    made: list[tuple[int, int]] = []
    library = types.SimpleNamespace(mallopt=lambda *call: made.append(call) or True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    found = keep_freed_memory(plan, available=available, ranks_here=2, environment=settings)
    assert found == (f"freed memory: {said}" if said else "")
    assert made == calls


def test_without_glibc_freed_memory_is_returned(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    said = keep_freed_memory(PLAN, available=10**12, ranks_here=1, environment={})
    assert said == "freed memory: returned (no glibc)"
