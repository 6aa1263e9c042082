import contextlib
import itertools
import threading

import pytest
from fake_cache import ahead, planner_of, wanted

from refocused.data.cache.fetch_plan import FetchQueue, ShardPlanner
from refocused.data.order.sequence_order import Order
from refocused.data.order.sequences import SequenceRange


def test_requested_shards_come_first_then_those_in_use_then_the_pinned():
    queue = FetchQueue()
    queue.plan([7, 4, 2, 5], {9, 8})
    queue.present = {4, 5}
    queue.request(5)  # it was removed
    queue.paused_until[7] = 5.0  # after a failure
    order = []
    while (index := queue.following(now=len(order) + 3.0)) is not None:
        queue.busy.add(index)
        order.append(index)
    assert order == [5, 8, 7, 9, 2]
    assert queue.following(now=9.0, shared={2}) == 2  # what can be helped with


def test_a_new_plan_forgets_what_others_may_evict_and_knows_what_was_planned_last():
    queue = FetchQueue()
    for planned in ([3], [1, 2], [5, 2]):
        queue.plan(planned, {0})
        queue.present |= {0, *planned}
    assert (queue.present, queue.wanted) == ({0, 2, 5}, {0, 2, 5})
    queue.request(7)
    assert sorted(queue.last_wanted, key=queue.last_wanted.__getitem__) == [3, 1, 5, 2, 7]
    assert (queue.ready(), queue.not_started()) == (2, 1)


def order_of(shards: int, *, block_shards: int = 2, skipped: tuple[int, ...] = ()) -> Order:
    ranges = [SequenceRange(i, 0, 4) for i in range(shards)]
    return Order(ranges, seed=3, block_shards=block_shards, skipped=skipped)


def use_of(order: Order, blocks: int) -> list[int]:
    return list(itertools.chain(*itertools.islice(order.blocks_from(0), blocks)))


@pytest.mark.parametrize(
    ("limits", "place"),
    [
        ({"oldest": 0, "newest": 0, "shards": 3}, slice(5)),
        ({"oldest": 1, "newest": 2, "shards": 1}, slice(2, 7)),
        *[
            ({"oldest": 0, "newest": 1, "shards": 100, "room": room}, slice(count))
            for room, count in [(90, 9), (59, 5), (50, 5), (49, 4), (40, 4), (5, 4)]
        ],
        *[
            (
                {"oldest": 0, "newest": 0, "shards": 6, "fetch_ahead_gb": limit and limit / 1e9},
                slice(count),
            )
            for limit, count in [(None, 8), (25, 4), (9, 2)]
        ],
    ],
)
def test_the_plan_has_the_blocks_in_use_and_as_many_shards_ahead_as_fit(limits, place):
    order = order_of(9)
    assert wanted(order, **limits) == use_of(order, 5)[place]


def test_the_plan_has_at_most_all_shards_and_none_that_are_skipped():
    assert sorted(wanted(order_of(3), oldest=0, newest=7, shards=100)) == [0, 1, 2]
    order = order_of(6, skipped=(0, 1, 5))
    assert sorted(wanted(order, oldest=0, newest=1, shards=9)) == [2, 3, 4]
    assert order.shard_count == 3


def test_a_plan_that_stays_the_same_is_not_made_again():
    planner, plans = planner_of(order_of(3, block_shards=1), ahead(5))
    for block in range(2):
        planner.reading(block, block)
    assert len(plans) == 1  # all shards, in order of use from the first block on


def test_a_block_stays_planned_until_training_has_left_it():
    order = order_of(8)  # two steps in each block
    planner, plans = planner_of(order, ahead(1))
    use = use_of(order, 4)
    for block in (0, 0, 1):
        planner.reading(block, block)
    assert plans == [use[:3], use[:5]]  # reading is in block 1, training not begun
    planner.training_on(0)
    planner.training_on(0)
    planner.reading(1, 1)
    assert len(plans) == 2
    planner.training_on(1)
    planner.reading(2, 2)
    assert plans[2:] == [use[2:7]]


def reader_without_room(blocks: int) -> tuple[ShardPlanner, list[list[int]], threading.Thread]:
    """Read steps of one block each, as many as there is room for; begin to read the next one."""
    planner, plans = planner_of(order_of(6, block_shards=1), ahead(0), room=10 * blocks)
    for block in range(blocks):
        planner.reading(block, block)

    def read() -> None:
        with contextlib.suppress(RuntimeError):
            planner.reading(blocks, blocks)

    reader = threading.Thread(target=read)
    reader.start()
    return planner, plans, reader


@pytest.mark.parametrize(
    ("blocks", "before", "then", "plans_made"),
    [
        (2, ["training_on 0", "trained"], "training_on 1", [1, 2, 2]),  # training leaves a block
        (1, ["training_on 0"], "trained", [1, 1]),  # all that was read is trained
        (2, [], "close", [1, 2]),
    ],
)
def test_reading_waits_for_room_until_training_moves_on(blocks, before, then, plans_made):
    planner, plans, reader = reader_without_room(blocks)

    def call(step: str) -> None:
        name, *block = step.split()
        getattr(planner, name)(*map(int, block))

    for step in before:
        call(step)
    reader.join(0.05)
    assert reader.is_alive()
    call(then)
    reader.join(60)
    assert not reader.is_alive()
    assert [len(plan) for plan in plans] == plans_made


def test_a_fast_training_has_more_fetched_ahead_and_never_fewer_again():
    now = [0.0]
    planner, plans = planner_of(
        order_of(40, block_shards=1), ahead(2, seconds=5.0), clock=lambda: now[0]
    )
    lengths = []
    for block in range(12):  # a step of 4 sequences uses a shard
        planner.training_on(block)
        planner.reading(block, block)
        lengths.append(len(plans[-1]))
        now[0] += 0.5 if block < 6 else 50.0
    assert lengths[0] == 3  # the block and two ahead, while the pace is unknown
    assert max(lengths) == 11  # two shards a second for five seconds, and the block
    assert lengths[-1] == 11
