from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest

from refocused.config.batch_plan import BatchPlan
from refocused.data.loader.loader import steps_from
from refocused.data.order.position import Position
from refocused.data.order.window_order import Order
from refocused.data.order.windows import WindowRange


def order_of(*counts: int, block_shards: int = 2, skipped: tuple[int, ...] = ()) -> Order:
    ranges = [WindowRange(i, 0, count) for i, count in enumerate(counts)]
    return Order(ranges, seed=3, block_shards=block_shards, skipped=skipped)


def windows_of_step(steps) -> list[tuple[int, int]]:
    """The windows of one step over all ranks."""
    pairs = [
        zip(step.shards.flatten().tolist(), step.windows.flatten().tolist(), strict=True)
        for step in steps
    ]
    return sorted(itertools.chain(*pairs))


PLANS_OF_16_WINDOWS = [
    BatchPlan(micro, accumulation, world_size, sequence_length=4)
    for micro, accumulation, world_size in itertools.product([1, 2, 4, 8, 16], [1, 2, 4], [1, 2, 4])
    if micro * accumulation * world_size == 16
]


def test_windows_are_dealt_out_by_accumulation_then_rank_then_row():
    order = order_of(50, 50)
    in_order = order.locate(np.arange(12)).windows.reshape(2, 3, 2)
    for rank in range(3):
        step = next(steps_from(order, Position(), plan=BatchPlan(2, 2, 3, 4), rank=rank))
        assert step.windows.tolist() == in_order[:, rank].tolist()


def test_the_stream_is_the_one_that_earlier_versions_trained_on():
    # A checkpoint holds a position, no order: it must mean the same windows in every version.
    ranges = [WindowRange(i, 3 * i, 50 + 17 * i) for i in range(9)]
    order = Order(ranges, seed=1337, block_shards=4)
    digest = hashlib.sha256()
    steps = steps_from(order, Position(0, 11), plan=BatchPlan(4, 2, 2, 8), rank=1)
    for step in itertools.islice(steps, 150):
        digest.update(np.stack([step.shards, step.windows]).astype("<i8").tobytes())
    assert step.after == Position(2, 287)
    assert digest.hexdigest() == "feff6b6b398e691d1163e5c8efa90b23a8307b355fc2146998530bd2815bdfe8"


@pytest.mark.parametrize("plan", PLANS_OF_16_WINDOWS)
def test_windows_of_skipped_shards_are_left_out_and_those_that_follow_move_up(plan):
    counts, start = (7, 12, 5, 20, 9), Position(0, 30)
    everything = order_of(*counts)
    order = order_of(*counts, skipped=(1, 3))
    first = everything.number_of(start)
    located = everything.locate(np.arange(first, first + 1000))
    kept = ~np.isin(located.shards, [1, 3])
    wanted = list(zip(located.shards[kept].tolist(), located.windows[kept].tolist(), strict=True))
    numbers = first + np.flatnonzero(kept)
    steps = [
        itertools.islice(steps_from(order, start, plan=plan, rank=rank), 12)
        for rank in range(plan.world_size)
    ]
    for number, step in enumerate(zip(*steps, strict=True)):
        own = wanted[16 * number : 16 * number + 16]
        assert windows_of_step(step) == sorted(own)
        # The position is that of the order with all shards, which takes no account of the skip.
        last = int(numbers[16 * number + 15])
        assert {one.after for one in step} == {everything.position_at(last + 1)}
        blocks = everything.blocks_of(numbers[[16 * number, 16 * number + 15]]).tolist()
        assert {(one.first_block, one.last_block) for one in step} == {tuple(blocks)}


def test_a_resume_with_other_shards_skipped_goes_on_at_the_window_after_the_last():
    plan, counts = BatchPlan(8, 1, 1, 4), (7, 12, 5, 20, 9)
    whole = steps_from(order_of(*counts, skipped=(3,)), Position(), plan=plan, rank=0)
    before = list(itertools.islice(whole, 9))
    resumed = steps_from(order_of(*counts, skipped=(3,)), before[4].after, plan=plan, rank=0)
    for ours, theirs in zip(resumed, before[5:], strict=False):
        assert (ours.shards.tolist(), ours.windows.tolist(), ours.after) == (
            theirs.shards.tolist(),
            theirs.windows.tolist(),
            theirs.after,
        )
    unskipped = next(steps_from(order_of(*counts), before[4].after, plan=plan, rank=0))
    order = order_of(*counts)
    first = order.number_of(before[4].after)
    located = order.locate(np.arange(first, first + 8))
    assert unskipped.windows[0].tolist() == located.windows.tolist()


def test_the_blocks_of_a_step_are_those_of_all_its_ranks():
    order = order_of(4, 4, 4, 4, block_shards=1)
    for rank in (0, 1):
        plan = BatchPlan(3, 1, 2, sequence_length=4)
        steps = itertools.islice(steps_from(order, Position(), plan=plan, rank=rank), 4)
        blocks = [(step.first_block, step.last_block) for step in steps]
        assert blocks == [(0, 1), (1, 2), (3, 4), (4, 5)]
