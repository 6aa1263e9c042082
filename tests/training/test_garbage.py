from __future__ import annotations

import gc
import weakref

import pytest

from refocused.training.garbage import WARM_STEPS, Garbage


class Node:
    """Refers to itself, so that only the collector removes it."""

    def __init__(self) -> None:
        self.me = self


def dropped() -> weakref.ref[Node]:
    return weakref.ref(Node())


def test_after_the_warm_up_cycles_go_only_when_the_loop_says_so() -> None:
    with Garbage() as garbage:
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


def test_it_is_as_before_in_the_end_also_after_an_error() -> None:
    with pytest.raises(ValueError, match="stop"), Garbage() as garbage:
        for _ in range(WARM_STEPS):
            garbage.step()
        raise ValueError("stop")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
