from __future__ import annotations

import contextlib
import itertools

import pytest
from fake_cache import FakeManifest, FolderCache

from refocused.config.batch_plan import BatchPlan
from refocused.data.cache.fetch_plan import FetchAhead
from refocused.data.loader.loader import Loader
from refocused.data.order.position import Position
from refocused.data.order.window_order import Order
from refocused.data.order.windows import split_windows

SEQUENCE_LENGTH, GLOBAL_BATCH = 4, 8
STEPS, CHANGED_AFTER = 20, 7  # 160 windows in all; the epoch of 65 ends twice on the way


@pytest.fixture(scope="module")
def manifest() -> FakeManifest:
    return FakeManifest.of(45, 60, 33, 80, 4, 55)


@pytest.fixture(scope="module")
def cache(tmp_path_factory, manifest) -> FolderCache:
    return FolderCache(tmp_path_factory.mktemp("shards"), manifest)


def rows_of(cache, manifest, position: Position, *, ranks: int, steps: int):
    """The rows of each step over all ranks, sorted, and the position after them."""
    order = Order(
        split_windows(manifest, sequence_length=SEQUENCE_LENGTH).train, seed=5, block_shards=2
    )
    plan = BatchPlan(GLOBAL_BATCH // ranks, 1, ranks, SEQUENCE_LENGTH)
    found: list[list[list[int]]] = [[] for _ in range(steps)]
    for rank in range(ranks):
        loader = Loader(order, cache, plan=plan, rank=rank, ahead=FetchAhead(6))
        with contextlib.closing(loader.batches_from(position)) as stream:
            for rows in found:
                rows += [row for batch in stream.next_step() for row in batch.input_ids.tolist()]
            after = stream.position
    return [sorted(rows) for rows in found], after


@pytest.mark.parametrize(("before", "after"), list(itertools.product([1, 2, 4, 8], repeat=2)))
def test_the_stream_is_the_same_when_the_number_of_ranks_changes(cache, manifest, before, after):
    unbroken, end = rows_of(cache, manifest, Position(), ranks=1, steps=STEPS)
    first, position = rows_of(cache, manifest, Position(), ranks=before, steps=CHANGED_AFTER)
    saved = Position.from_dict(position.to_dict())
    rest, last = rows_of(cache, manifest, saved, ranks=after, steps=STEPS - CHANGED_AFTER)
    assert first + rest == unbroken
    assert sum(map(len, first + rest)) == 160
    assert last == end
