from __future__ import annotations

import random

import numpy as np
import pytest

from refocused.data.order.sources import most_bytes_of_a_step
from refocused.data.order.window_order import Order
from refocused.data.order.windows import WindowRange


def found_by_trying(order: Order, *, step_windows: int, windows: int, sizes: list[int]) -> int:
    """The most bytes of all steps that may begin anywhere in the run."""
    most = 0
    for begin in range(windows):
        first, last = order.blocks_of(np.array([begin, begin + step_windows - 1])).tolist()
        if last - first > 1:
            most = max(most, sum(sizes[shard] for shard in set(order.shards_between(first, last))))
    return most


@pytest.mark.parametrize("block_shards", [1, 2, 3])
@pytest.mark.parametrize("step_windows", [1, 3, 4, 5, 12, 40])
def test_it_is_what_trying_all_steps_finds(block_shards: int, step_windows: int) -> None:
    chance = random.Random(step_windows)
    counts = [chance.choice((1, 2, 3, 9)) for _ in range(8)]
    sizes = [100 * count + shard for shard, count in enumerate(counts)]
    ranges = [WindowRange(shard, 0, count) for shard, count in enumerate(counts)]
    order = Order(ranges, seed=5, block_shards=block_shards)
    windows = 3 * order.windows_per_epoch
    tried = found_by_trying(order, step_windows=step_windows, windows=windows, sizes=sizes)
    most = most_bytes_of_a_step(
        order, step_windows=step_windows, windows=windows, shard_bytes=sizes
    )
    assert most == tried
    if step_windows in (1, 12, 40):
        assert (most > 0) == (step_windows > 1)


def test_a_step_of_many_epochs_needs_every_shard_once() -> None:
    order = Order([WindowRange(shard, 0, 2) for shard in range(3)], seed=1, block_shards=1)
    assert most_bytes_of_a_step(order, step_windows=50, windows=50, shard_bytes=[5, 6, 7]) == 18
