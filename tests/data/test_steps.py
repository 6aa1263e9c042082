from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refocused.config.batch_plan import BatchPlan
from refocused.data.cache.steps import Pace, ShardPlanner, shards_wanted, steps_from
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


def global_steps(order: Order, position: Position, plan: BatchPlan, *, count: int):
    ranks = [steps_from(order, position, plan=plan, rank=rank) for rank in range(plan.world_size)]
    return [windows_of_step(steps) for steps in itertools.islice(zip(*ranks, strict=True), count)]


PLANS_OF_16_WINDOWS = [
    BatchPlan(micro, accumulation, world_size, sequence_length=4)
    for micro, accumulation, world_size in itertools.product([1, 2, 4, 8, 16], [1, 2, 4], [1, 2, 4])
    if micro * accumulation * world_size == 16
]


@pytest.mark.parametrize("plan", PLANS_OF_16_WINDOWS)
def test_ranks_and_accumulation_do_not_change_what_a_step_holds(plan):
    order = order_of(7, 12, 5, 20, 9)  # 53 windows: epochs end inside steps
    alone = BatchPlan(16, 1, 1, sequence_length=4)
    start = Position(1, 40)
    assert global_steps(order, start, plan, count=12) == global_steps(order, start, alone, count=12)


def test_windows_are_dealt_out_by_accumulation_then_rank_then_row():
    order = order_of(50, 50)
    in_order = order.locate(0, np.arange(12)).windows.reshape(2, 3, 2)
    for rank in range(3):
        step = next(steps_from(order, Position(), plan=BatchPlan(2, 2, 3, 4), rank=rank))
        assert step.windows.tolist() == in_order[:, rank].tolist()


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(1, 15), min_size=1, max_size=6),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    world_size=st.sampled_from([1, 2, 4]),
)
def test_every_window_comes_once_an_epoch_though_steps_straddle_the_ends(
    counts, micro, accumulation, world_size
):
    order = order_of(*counts)
    plan = BatchPlan(micro, accumulation, world_size, sequence_length=4)
    epochs = 3
    steps = -(-epochs * order.windows_per_epoch // plan.windows)
    seen: dict[tuple[int, int], int] = {}
    for step in global_steps(order, Position(), plan, count=steps):
        for window in step:
            seen[window] = seen.get(window, 0) + 1
    rest = steps * plan.windows - epochs * order.windows_per_epoch
    assert sum(seen.values()) == epochs * order.windows_per_epoch + rest
    more, last = divmod(rest, order.windows_per_epoch)
    assert set(seen) == {(i, w) for i, count in enumerate(counts) for w in range(count)}
    assert sorted(seen.values()) == sorted(
        [epochs + more + 1] * last + [epochs + more] * (order.windows_per_epoch - last)
    )


@settings(deadline=None, max_examples=40)
@given(done=st.integers(0, 40), micro=st.integers(1, 5), world_size=st.sampled_from([1, 2, 3]))
def test_resuming_anywhere_continues_the_stream(done, micro, world_size):
    order = order_of(7, 12, 1, 5)
    plan = BatchPlan(micro, 2, world_size, sequence_length=4)
    rank = world_size - 1
    unbroken = steps_from(order, Position(0, 3), plan=plan, rank=rank)
    position = Position(0, 3)
    for step in itertools.islice(unbroken, done):
        position = step.after
    resumed = steps_from(order, position, plan=plan, rank=rank)
    for ours, theirs in itertools.islice(zip(resumed, unbroken, strict=True), 5):
        assert np.array_equal(ours.shards, theirs.shards)
        assert np.array_equal(ours.windows, theirs.windows)
        assert (ours.first_block, ours.last_block) == (theirs.first_block, theirs.last_block)
        assert ours.after == theirs.after


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


def test_another_global_batch_continues_at_the_same_window():
    order = order_of(30, 30)
    before = next(steps_from(order, Position(), plan=BatchPlan(7, 1, 1, 4), rank=0))
    after = next(steps_from(order, before.after, plan=BatchPlan(5, 1, 1, 4), rank=0))
    located = order.locate(0, np.arange(7, 12))
    assert after.windows[0].tolist() == located.windows.tolist()
    assert after.after == Position(0, 12)


@pytest.mark.parametrize("plan", PLANS_OF_16_WINDOWS)
def test_windows_of_skipped_shards_are_left_out_and_those_that_follow_move_up(plan):
    counts, start = (7, 12, 5, 20, 9), Position(0, 30)
    everything = order_of(*counts)
    order = order_of(*counts, skipped=(1, 3))
    first = everything.number_of(start)
    located = everything.locate_in_stream(np.arange(first, first + 1000))
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
        blocks = everything.blocks_in_stream(numbers[[16 * number, 16 * number + 15]]).tolist()
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
    located = order.locate_in_stream(np.arange(first, first + 8))
    assert unskipped.windows[0].tolist() == located.windows.tolist()


def test_skipped_shards_are_not_wanted_locally():
    order = order_of(4, 4, 4, 4, 4, 4, block_shards=2, skipped=(0, 1, 5))
    wanted = shards_wanted(
        order, oldest=0, newest=1, ahead=9, bytes_of=lambda shard: 1, room_bytes=None
    )
    assert sorted(wanted) == [2, 3, 4]
    assert order.shard_count == 3


def test_the_blocks_of_a_step_are_those_of_all_its_ranks():
    order = order_of(4, 4, 4, 4, block_shards=1)
    for rank in (0, 1):
        plan = BatchPlan(3, 1, 2, sequence_length=4)
        steps = itertools.islice(steps_from(order, Position(), plan=plan, rank=rank), 4)
        blocks = [(step.first_block, step.last_block) for step in steps]
        assert blocks == [(0, 1), (1, 2), (3, 4), (4, 5)]


def wanted(order: Order, *, oldest: int, newest: int, ahead: int, room_bytes: int | None = None):
    return shards_wanted(
        order,
        oldest=oldest,
        newest=newest,
        ahead=ahead,
        bytes_of=lambda shard: 10,
        room_bytes=room_bytes,
    )


def test_wanted_shards_are_in_order_of_use_with_some_ahead():
    order = order_of(*[5] * 9, block_shards=2)
    use = list(itertools.chain(*itertools.islice(order.blocks_from(0), 5)))
    assert wanted(order, oldest=0, newest=0, ahead=3) == use[:5]
    assert wanted(order, oldest=1, newest=2, ahead=1) == use[2:7]


def test_wanted_shards_end_when_all_are_wanted():
    order = order_of(5, 5, 5, block_shards=2)
    assert sorted(wanted(order, oldest=0, newest=7, ahead=100)) == [0, 1, 2]


@pytest.mark.parametrize(("room", "count"), [(90, 9), (59, 5), (50, 5), (49, 4), (40, 4), (5, 4)])
def test_shards_ahead_are_wanted_only_as_far_as_there_is_room(room, count):
    order = order_of(*[5] * 9, block_shards=2)
    use = list(itertools.chain(*itertools.islice(order.blocks_from(0), 5)))
    assert wanted(order, oldest=0, newest=1, ahead=100, room_bytes=room) == use[:count]


def test_a_plan_that_stays_the_same_is_not_made_again():
    order = order_of(4, 4, 4, block_shards=1)
    cache = RecordingCache()
    planner = ShardPlanner(order, cache, ahead=5, room_bytes=None)
    plan = BatchPlan(4, 1, 1, 4)
    for step in itertools.islice(steps_from(order, Position(), plan=plan, rank=0), 2):
        planner.reading(step)
    assert len(cache.plans) == 1  # all shards, in order of use from the first block on


class RecordingCache:
    def __init__(self):
        self.plans = []

    def plan(self, needed):
        self.plans.append(list(needed))

    def local_bytes(self, index):
        return 10


def test_a_block_stays_planned_until_training_has_left_it():
    order = order_of(*[4] * 8, block_shards=2)  # blocks of 8 windows: two steps
    cache = RecordingCache()
    planner = ShardPlanner(order, cache, ahead=1, room_bytes=None)
    steps = list(
        itertools.islice(steps_from(order, Position(), plan=BatchPlan(4, 1, 1, 4), rank=0), 6)
    )
    use = list(itertools.chain(*itertools.islice(order.blocks_from(0), 4)))
    for step in steps[:3]:
        planner.reading(step)
    assert cache.plans == [use[:3], use[:5]]  # reading is in block 1, training not begun
    planner.training_on(steps[0])
    planner.training_on(steps[1])
    planner.reading(steps[3])
    assert len(cache.plans) == 2
    planner.training_on(steps[2])
    planner.reading(steps[4])
    assert cache.plans[2:] == [use[2:7]]


def reader_without_room(
    *, blocks: int
) -> tuple[ShardPlanner, RecordingCache, list, threading.Thread]:
    """Read steps of one block each, as many as there is room for; the next one is started."""
    order = order_of(*[4] * 6, block_shards=1)
    cache = RecordingCache()
    planner = ShardPlanner(order, cache, ahead=0, room_bytes=10 * blocks)
    plan = BatchPlan(4, 1, 1, 4)
    steps = list(itertools.islice(steps_from(order, Position(), plan=plan, rank=0), blocks + 1))
    for step in steps[:-1]:
        assert planner.has_room(step)
        planner.reading(step)
    assert not planner.has_room(steps[-1])

    def read() -> None:
        with contextlib.suppress(RuntimeError):
            planner.reading(steps[-1])

    reader = threading.Thread(target=read)
    reader.start()
    return planner, cache, steps, reader


def test_reading_waits_for_room_until_training_has_left_a_block():
    planner, cache, steps, reader = reader_without_room(blocks=2)
    planner.training_on(steps[0])
    planner.trained()  # with the second step, whose batches are there
    reader.join(0.05)
    assert reader.is_alive()
    planner.training_on(steps[1])
    reader.join(10)
    assert [len(plan) for plan in cache.plans] == [1, 2, 2]


def test_reading_has_the_room_to_itself_when_training_is_through_with_all_that_was_read():
    planner, cache, steps, reader = reader_without_room(blocks=1)
    planner.training_on(steps[0])
    reader.join(0.05)
    assert reader.is_alive()
    planner.trained()
    reader.join(10)
    assert [len(plan) for plan in cache.plans] == [1, 1]


def test_a_reader_that_waits_for_training_ends_when_the_stream_is_closed():
    planner, cache, _, reader = reader_without_room(blocks=2)
    planner.close()
    reader.join(10)
    assert not reader.is_alive()
    assert len(cache.plans) == 2


@pytest.mark.parametrize(("limit", "count"), [(None, 8), (25, 4), (9, 2)])
def test_a_limit_in_bytes_holds_for_the_shards_ahead_alone(limit, count):
    order = order_of(*[10] * 8, block_shards=2)
    found = shards_wanted(
        order,
        oldest=0,
        newest=0,
        ahead=6,
        bytes_of=lambda shard: 10,
        room_bytes=None,
        ahead_bytes=limit,
    )
    assert len(found) == count


def test_the_pace_tells_how_many_shards_a_time_takes():
    now = [10.0]
    pace = Pace(shards_per_step=0.25, clock=lambda: now[0])
    assert pace.shards_in(60) == 0
    for _ in range(9):  # the first one starts the clock
        pace.step()
    now[0] = 14.0
    assert pace.shards_in(60) == 30  # 8 steps in 4 s, each a quarter of a shard


def test_a_fast_training_has_more_fetched_ahead_and_never_fewer_again():
    order = order_of(*[10] * 40, block_shards=1)
    cache = RecordingCache()
    now = [0.0]
    pace = Pace(shards_per_step=1.0, clock=lambda: now[0])
    planner = ShardPlanner(order, cache, ahead=2, room_bytes=None, ahead_seconds=5.0, pace=pace)
    lengths = []
    steps = steps_from(order, Position(), plan=BatchPlan(10, 1, 1, 4), rank=0)
    for number, step in enumerate(itertools.islice(steps, 12)):
        planner.training_on(step)
        planner.reading(step)
        lengths.append(len(cache.plans[-1]))
        now[0] += 0.5 if number < 6 else 50.0
    assert lengths[0] == 3  # the block and two ahead, while the pace is unknown
    assert max(lengths) == 11  # two shards a second for five seconds, and the block
    assert lengths[-1] == 11
