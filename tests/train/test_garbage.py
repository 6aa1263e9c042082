"""Garbage collection by the loop, and memory kept by the allocator."""

import ctypes
import gc
import types
import weakref
from collections.abc import Iterator

import pytest

from refocused.estimate.memory_plan import HostPlan
from refocused.train.step.garbage_collection import (
    WARM_STEPS,
    Garbage,
    keep_freed_memory,
    quick_imports,
)

PLAN = HostPlan(building=0, tensors=0, copies=10**9, processes=0, temporaries=2 * 10**9)


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


class Node:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


def dropped() -> weakref.ref[Node]:
    return weakref.ref(Node())


def test_after_the_warm_up_garbage_is_collected_by_the_loop() -> None:
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


def test_imports_are_not_collected_and_the_collector_is_then_as_before() -> None:
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
def test_freed_memory_is_kept_if_there_is_room(
    available: int,
    settings: dict[str, str],
    plan: HostPlan,
    said: str,
    calls: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, int]] = []
    library = types.SimpleNamespace(mallopt=lambda *call: made.append(call) or True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    found = keep_freed_memory(plan, available=available, ranks_here=2, environment=settings)
    assert found == (f"freed memory: {said}" if said else "")
    assert made == calls


def test_without_glibc_freed_memory_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    said = keep_freed_memory(PLAN, available=10**12, ranks_here=1, environment={})
    assert said == "freed memory: returned (no glibc)"
