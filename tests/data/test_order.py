import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refocused.config.batch_plan import BatchPlan
from refocused.data.loader.loader import steps_from
from refocused.data.order.sequence_order import Order, choose_block_shards
from refocused.data.order.sequences import Position, SequenceRange, sequence_count
from refocused.system.errors import CheckpointError, ShardError


def ranges_of(*counts: int) -> list[SequenceRange]:
    """Ranges with gaps in shard numbers and first sequences, so that mixing them up shows."""
    return [SequenceRange(3 * i + 1, 2 * i, count) for i, count in enumerate(counts)]


def epoch_of(order: Order, epoch: int) -> list[tuple[int, int]]:
    located = order.locate(epoch * order.sequences_per_epoch + np.arange(order.sequences_per_epoch))
    return list(zip(located.shards.tolist(), located.sequences.tolist(), strict=True))


all_ranges = st.lists(st.integers(1, 40), min_size=1, max_size=12).map(lambda c: ranges_of(*c))


@settings(deadline=None)
@given(
    ranges=all_ranges,
    seed=st.integers(0, 2**64),
    epoch=st.integers(0, 10**6),
    block_shards=st.integers(1, 14),
)
def test_an_epoch_holds_every_sequence_exactly_once(ranges, seed, epoch, block_shards):
    order = Order(ranges, seed=seed, block_shards=block_shards)
    expected = [(r.shard, w) for r in ranges for w in range(r.first, r.first + r.count)]
    assert order.sequences_per_epoch == sequence_count(ranges) == len(expected)
    assert sorted(epoch_of(order, epoch)) == expected


@settings(deadline=None)
@given(ranges=all_ranges, block_shards=st.integers(1, 14), epoch=st.integers(0, 5))
def test_sequences_stay_inside_their_block_and_blocks_follow_each_other(
    ranges, block_shards, epoch
):
    order = Order(ranges, seed=5, block_shards=block_shards)
    numbers = epoch * order.sequences_per_epoch + np.arange(order.sequences_per_epoch)
    shards, found = order.locate(numbers).shards, order.blocks_of(numbers)
    first = epoch * order.blocks_per_epoch
    assert np.unique(found).tolist() == list(range(first, first + order.blocks_per_epoch))
    assert (np.diff(found) >= 0).all()
    blocks = itertools.islice(order.blocks_from(first), order.blocks_per_epoch)
    for number, expected in enumerate(blocks, start=first):
        assert set(shards[found == number].tolist()) == set(expected)
        assert len(expected) <= block_shards
        assert order.block_start(number) == numbers[found == number][0]


def test_pinned_order_holds_on_every_platform():
    order = Order(ranges_of(3, 2, 4), seed=1337, block_shards=2)
    shards, sequences = zip(*epoch_of(order, 0) + epoch_of(order, 7), strict=True)
    assert shards == (4, 7, 4, 7, 7, 7, 1, 1, 1, 7, 7, 1, 7, 7, 1, 1, 4, 4)
    assert sequences == (2, 5, 3, 7, 6, 4, 1, 0, 2, 4, 5, 0, 7, 6, 1, 2, 2, 3)


SIZES = [10] * 17 + [80, 100, 90]


@pytest.mark.parametrize(
    ("setting", "sizes", "room", "expected"),
    [
        (7, SIZES, None, 7),  # what was set is obeyed
        (7, SIZES, 1000, 7),
        (99, SIZES, None, 20),  # no more than there are
        (0, SIZES, None, 16),
        (0, SIZES, 2 * (100 + 90 + 80), 3),  # the three largest fill half the room
        (0, SIZES, 2 * (100 + 90 + 80) - 1, 2),
        (0, SIZES, 10**9, 16),
        (0, SIZES, 190, 1),
        (0, SIZES, 189, r"of 1 shards take up to 190 bytes.*leaves 189 .*by at least 0\.001\."),
        (2, SIZES[-4:], 199, r"of 2 shards take up to 280 bytes.*or lower data\.block_shards"),
    ],
)
def test_block_shards_follow_the_setting_or_half_the_room(setting, sizes, room, expected):
    # A shard that only validates is the largest, and counts for nothing.
    choice = {
        "sources": [[SequenceRange(i, 0, 5) for i in range(len(sizes))]],
        "shard_bytes": [*sizes, 10**12],
        "room_bytes": room,
    }
    if isinstance(expected, int):
        assert choose_block_shards(setting, **choice) == expected
    else:
        with pytest.raises(ShardError, match=f"two blocks {expected}"):
            choose_block_shards(setting, **choice)


def test_the_saved_form_of_a_position_is_that_of_every_version():
    assert Position(3, 12).to_dict() == {"epoch": 3, "sequences": 12}


@pytest.mark.parametrize(
    "saved",
    [
        {"epoch": 1},
        {"epoch": 1, "sequences": 2, "step": 3},
        {"epoch": 1, "sequences": -2},
        {"epoch": True, "sequences": 2.0},
        {"epoch": 1, "sequences": 2, "sources": 2},
        {"epoch": 1, "sequences": 2, "sources": {"web": 2.5}},
    ],
)
def test_a_damaged_position_is_refused_and_shown(saved):
    with pytest.raises(CheckpointError) as caught:
        Position.from_dict(saved)
    assert repr(saved) in str(caught.value)


def order_of(*counts: int, block_shards: int = 2, skipped: tuple[int, ...] = ()) -> Order:
    ranges = [SequenceRange(i, 0, count) for i, count in enumerate(counts)]
    return Order(ranges, seed=3, block_shards=block_shards, skipped=skipped)


def sequences_of_step(steps) -> list[tuple[int, int]]:
    """The sequences of one step over all ranks."""
    pairs = [
        zip(step.shards.flatten().tolist(), step.sequences.flatten().tolist(), strict=True)
        for step in steps
    ]
    return sorted(itertools.chain(*pairs))


PLANS_OF_16_WINDOWS = [
    BatchPlan(micro_batch_size, gradient_accumulation_steps, world_size, sequence_length=4)
    for micro_batch_size, gradient_accumulation_steps, world_size in itertools.product(
        [1, 2, 4, 8, 16], [1, 2, 4], [1, 2, 4]
    )
    if micro_batch_size * gradient_accumulation_steps * world_size == 16
]


def test_sequences_are_dealt_out_by_accumulation_then_rank_then_row():
    order = order_of(50, 50)
    in_order = order.locate(np.arange(12)).sequences.reshape(2, 3, 2)
    for rank in range(3):
        step = next(steps_from(order, Position(), plan=BatchPlan(2, 2, 3, 4), rank=rank))
        assert step.sequences.tolist() == in_order[:, rank].tolist()


@pytest.mark.parametrize("made", [0, 2, 5, 9, 20])
def test_a_growing_batch_takes_the_same_sequences_in_smaller_steps(made):
    plan, order = BatchPlan(2, 4, 3, 4, warmup_steps=9), order_of(7, 12, 5, 20, skipped=(1,))
    whole = [
        list(itertools.islice(steps_from(order, Position(), plan=plan, rank=rank), 30))
        for rank in range(3)
    ]
    sizes = [step.sequences.shape for step in whole[0]]
    assert sizes == [(plan.micro_batches(step), 2) for step in range(30)]
    small = BatchPlan(2, 1, 3, 4)  # a pass at a time
    micro_batches = [
        list(itertools.islice(steps_from(order, Position(), plan=small, rank=rank), 30))
        for rank in range(3)
    ]
    for ours, theirs in zip(whole, micro_batches, strict=True):
        joined = np.concatenate([step.sequences for step in ours])
        assert joined[:30].tolist() == [step.sequences[0].tolist() for step in theirs]
    start = whole[1][made - 1].after if made else Position()
    resumed = steps_from(order, start, plan=plan, rank=1, made=made)
    for ours, theirs in zip(resumed, whole[1][made:], strict=False):
        assert (ours.sequences.tolist(), ours.after) == (theirs.sequences.tolist(), theirs.after)


def test_the_stream_is_the_one_that_earlier_versions_trained_on():
    # A checkpoint holds a position, no order: it must mean the same sequences in every version.
    ranges = [SequenceRange(i, 3 * i, 50 + 17 * i) for i in range(9)]
    order = Order(ranges, seed=1337, block_shards=4)
    digest = hashlib.sha256()
    steps = steps_from(order, Position(0, 11), plan=BatchPlan(4, 2, 2, 8), rank=1)
    for step in itertools.islice(steps, 150):
        digest.update(np.stack([step.shards, step.sequences]).astype("<i8").tobytes())
    assert step.after == Position(2, 287)
    assert digest.hexdigest() == "feff6b6b398e691d1163e5c8efa90b23a8307b355fc2146998530bd2815bdfe8"


@pytest.mark.parametrize("plan", PLANS_OF_16_WINDOWS)
def test_sequences_of_skipped_shards_are_left_out_and_those_that_follow_move_up(plan):
    counts, start = (7, 12, 5, 20, 9), Position(0, 30)
    everything = order_of(*counts)
    order = order_of(*counts, skipped=(1, 3))
    first = everything.number_of(start)
    located = everything.locate(np.arange(first, first + 1000))
    kept = ~np.isin(located.shards, [1, 3])
    wanted = list(zip(located.shards[kept].tolist(), located.sequences[kept].tolist(), strict=True))
    numbers = first + np.flatnonzero(kept)
    steps = [
        itertools.islice(steps_from(order, start, plan=plan, rank=rank), 12)
        for rank in range(plan.world_size)
    ]
    for number, step in enumerate(zip(*steps, strict=True)):
        own = wanted[16 * number : 16 * number + 16]
        assert sequences_of_step(step) == sorted(own)
        # The position is that of the order with all shards, which takes no account of the skip.
        last = int(numbers[16 * number + 15])
        assert {one.after for one in step} == {everything.position_at(last + 1)}
        blocks = everything.blocks_of(numbers[[16 * number, 16 * number + 15]]).tolist()
        assert {(one.first_block, one.last_block) for one in step} == {tuple(blocks)}


def test_a_resume_may_skip_a_shard_and_more_of_the_stream_than_is_planned_at_once():
    order, plan = order_of(7, 12, 5, skipped=(1,)), BatchPlan(4, 1, 1, 4)
    order.left_out = [range(6, 1006)]
    step = next(steps_from(order, Position(0, 6), plan=plan, rank=0))
    numbers = np.arange(1006, 1100)
    located = order.locate(numbers)
    assert step.sequences[0].tolist() == located.sequences[located.shards != 1][:4].tolist()


def test_skipped_parts_of_the_stream_are_left_out_and_a_resume_within_continues():
    order, plan, skipped = order_of(7, 12, 5), BatchPlan(4, 1, 1, 4), [range(6, 13), range(40, 47)]
    kept = [n for n in range(200) if not any(n in one for one in skipped)]
    located = order.locate(np.array(kept))
    order.left_out = skipped
    steps = list(itertools.islice(steps_from(order, Position(), plan=plan, rank=0), 20))
    assert np.concatenate([s.sequences.ravel() for s in steps]).tolist() == [
        *located.sequences[:80]
    ]
    assert [order.number_of(s.after) for s in steps] == [kept[4 * n + 3] + 1 for n in range(20)]
    for made in (1, 2, 9):
        rest = steps_from(order, steps[made - 1].after, plan=plan, rank=0)
        assert next(rest).after == steps[made].after
    # A range from the present position on moves the next step behind it.
    order.left_out = [range(8, 10**12)]
    assert next(steps_from(order, Position(0, 8), plan=plan, rank=0)).first_block > 8


def test_a_resume_with_other_skipped_shards_continues_after_the_last_sequence():
    plan, counts = BatchPlan(8, 1, 1, 4), (7, 12, 5, 20, 9)
    whole = steps_from(order_of(*counts, skipped=(3,)), Position(), plan=plan, rank=0)
    before = list(itertools.islice(whole, 9))
    resumed = steps_from(order_of(*counts, skipped=(3,)), before[4].after, plan=plan, rank=0)
    for ours, theirs in zip(resumed, before[5:], strict=False):
        assert (ours.shards.tolist(), ours.sequences.tolist(), ours.after) == (
            theirs.shards.tolist(),
            theirs.sequences.tolist(),
            theirs.after,
        )
    unskipped = next(steps_from(order_of(*counts), before[4].after, plan=plan, rank=0))
    order = order_of(*counts)
    first = order.number_of(before[4].after)
    located = order.locate(np.arange(first, first + 8))
    assert unskipped.sequences[0].tolist() == located.sequences.tolist()
