from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refocused.data.order.window_order import Order, choose_block_shards
from refocused.data.order.windows import WindowRange, window_count
from refocused.system.errors import ShardError


def ranges_of(*counts: int) -> list[WindowRange]:
    """Ranges with gaps in shard numbers and first windows, so that mixing them up shows."""
    return [WindowRange(3 * i + 1, 2 * i, count) for i, count in enumerate(counts)]


def epoch_of(order: Order, epoch: int) -> list[tuple[int, int]]:
    located = order.locate(epoch, np.arange(order.windows_per_epoch))
    return list(zip(located.shards.tolist(), located.windows.tolist(), strict=True))


all_ranges = st.lists(st.integers(1, 40), min_size=1, max_size=12).map(lambda c: ranges_of(*c))


@settings(deadline=None)
@given(
    ranges=all_ranges,
    seed=st.integers(0, 2**64),
    epoch=st.integers(0, 10**6),
    block_shards=st.integers(1, 14),
)
def test_an_epoch_holds_every_window_exactly_once(ranges, seed, epoch, block_shards):
    order = Order(ranges, seed=seed, block_shards=block_shards)
    expected = [(r.shard, w) for r in ranges for w in range(r.first, r.first + r.count)]
    assert order.windows_per_epoch == window_count(ranges) == len(expected)
    assert sorted(epoch_of(order, epoch)) == expected


@settings(deadline=None)
@given(ranges=all_ranges, block_shards=st.integers(1, 14), epoch=st.integers(0, 5))
def test_windows_stay_inside_their_block_and_blocks_follow_each_other(ranges, block_shards, epoch):
    order = Order(ranges, seed=5, block_shards=block_shards)
    located = order.locate(epoch, np.arange(order.windows_per_epoch))
    first = epoch * order.blocks_per_epoch
    assert np.unique(located.blocks).tolist() == list(range(first, first + order.blocks_per_epoch))
    assert (np.diff(located.blocks) >= 0).all()
    blocks = itertools.islice(order.blocks_from(first), order.blocks_per_epoch)
    for number, shards in enumerate(blocks, start=first):
        assert set(located.shards[located.blocks == number].tolist()) == set(shards)
        assert len(shards) <= block_shards


def test_blocks_run_on_into_following_epochs_from_any_start():
    order = Order(ranges_of(*[4] * 7), seed=2, block_shards=3)
    stream = list(itertools.islice(order.blocks_from(0), 12))
    assert [len(block) for block in stream] == [3, 3, 1] * 4
    assert sorted(sum(stream[3:6], ())) == [1, 4, 7, 10, 13, 16, 19]
    assert list(itertools.islice(order.blocks_from(5), 7)) == stream[5:]


@settings(deadline=None)
@given(
    numbers=st.lists(st.integers(0, 500), min_size=1, max_size=30), block_shards=st.integers(1, 4)
)
def test_a_window_depends_on_its_number_only(numbers, block_shards):
    order = Order(ranges_of(5, 1, 9, 7), seed=11, block_shards=block_shards)
    together = order.locate_in_stream(np.array(numbers))
    for place, number in enumerate(numbers):
        epoch, k = divmod(number, order.windows_per_epoch)
        alone = order.locate(epoch, np.array([k]))
        assert together.shards[place] == alone.shards[0]
        assert together.windows[place] == alone.windows[0]
        assert together.blocks[place] == alone.blocks[0]


def test_seeds_and_epochs_change_the_order():
    ranges = ranges_of(*[50] * 6)
    orders = [Order(ranges, seed=seed, block_shards=2) for seed in (0, 1)]
    epochs = [epoch_of(order, epoch) for order in orders for epoch in (0, 1)]
    for one, other in itertools.combinations(epochs, 2):
        same = sum(a == b for a, b in zip(one, other, strict=True))
        assert same < 15  # 1 of 300 is expected by chance


def test_windows_of_a_block_are_mixed_over_its_shards():
    order = Order(ranges_of(*[1000] * 4), seed=9, block_shards=4)
    shards, windows = np.array(epoch_of(order, 0)).T
    limit = 5 / np.sqrt(len(shards))
    for values in (shards, windows):
        assert abs(np.corrcoef(np.arange(len(values)), values)[0, 1]) < limit
    for quarter in np.split(shards, 4):
        counts = np.unique(quarter, return_counts=True)[1]
        assert (np.abs(counts - 250) < 5 * np.sqrt(250 * 0.75)).all()


def test_one_window_is_an_epoch():
    order = Order([WindowRange(4, 7, 1)], seed=0, block_shards=16)
    assert [epoch_of(order, epoch) for epoch in range(3)] == [[(4, 7)]] * 3


def test_a_large_data_set_makes_no_large_array():
    ranges = [WindowRange(i, 0, 16_384) for i in range(1538)]
    order = Order(ranges, seed=1, block_shards=16)
    held = [value for value in vars(order).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in held) < 100_000
    ks = np.array([0, 12_345_678, order.windows_per_epoch - 1])
    # 1538 shards make 97 blocks; epoch 2 begins with block 194.
    assert order.locate(2, ks).blocks.tolist() == [194, 194 + 12_345_678 // (16 * 16_384), 290]


def test_pinned_order_holds_on_every_platform():
    order = Order(ranges_of(3, 2, 4), seed=1337, block_shards=2)
    assert epoch_of(order, 0) == [
        (4, 2),
        (7, 5),
        (4, 3),
        (7, 7),
        (7, 6),
        (7, 4),
        (1, 1),
        (1, 0),
        (1, 2),
    ]
    assert epoch_of(order, 7) == [
        (7, 4),
        (7, 5),
        (1, 0),
        (7, 7),
        (7, 6),
        (1, 1),
        (1, 2),
        (4, 2),
        (4, 3),
    ]


@pytest.mark.parametrize(
    ("setting", "room", "expected"),
    [
        (7, None, 7),  # what was set is obeyed
        (7, 1000, 7),
        (99, None, 20),  # no more than there are
        (0, None, 16),
        (0, 2 * (100 + 90 + 80), 3),  # the three largest fill half the room
        (0, 2 * (100 + 90 + 80) - 1, 2),
        (0, 10**9, 16),
        (0, 190, 1),
    ],
)
def test_block_shards_follow_the_setting_or_half_the_room(setting, room, expected):
    sizes = [10] * 17 + [80, 100, 90]
    ranges = [WindowRange(i, 0, 5) for i in range(20)]
    chosen = choose_block_shards(setting, ranges=ranges, shard_bytes=sizes, room_bytes=room)
    assert chosen == expected


@pytest.mark.parametrize(
    ("setting", "room", "text"),
    [
        (0, 189, r"two blocks of 1 shards take up to 190 bytes.*leaves 189 .*by at least 0\.001\."),
        (2, 199, r"two blocks of 2 shards take up to 200 bytes.*or lower data\.block_shards"),
    ],
)
def test_room_for_less_than_two_blocks_is_refused_with_the_numbers(setting, room, text):
    with pytest.raises(ShardError, match=text):
        choose_block_shards(
            setting,
            ranges=[WindowRange(i, 0, 5) for i in range(4)],
            shard_bytes=[100, 90, 5, 5],
            room_bytes=room,
        )


def test_block_shards_do_not_count_shards_that_only_validate():
    ranges = [WindowRange(1, 0, 5), WindowRange(2, 0, 5)]
    chosen = choose_block_shards(0, ranges=ranges, shard_bytes=[10**12, 4, 4], room_bytes=16)
    assert chosen == 2


@settings(deadline=None)
@given(
    ranges=all_ranges,
    block_shards=st.integers(1, 14),
    numbers=st.lists(st.integers(0, 2000), min_size=1, max_size=30),
)
def test_the_blocks_alone_are_those_of_the_windows_found(ranges, block_shards, numbers):
    order = Order(ranges, seed=7, block_shards=block_shards)
    wanted = np.array(numbers).reshape(1, -1)
    blocks = order.blocks_in_stream(wanted)
    assert blocks.tolist() == order.locate_in_stream(wanted).blocks.tolist()
