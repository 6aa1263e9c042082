from __future__ import annotations

import pytest
from fake_cache import SHARD_STRIDE, FakeManifest, FolderCache
from hypothesis import given, settings
from hypothesis import strategies as st

from refocused.config.batch_plan import BatchPlan
from refocused.data.cache.fetch_plan import FetchAhead
from refocused.data.loader.batch import IGNORED_LABEL
from refocused.data.loader.loader import Loader
from refocused.data.order.window_order import Order
from refocused.data.order.windows import ValidationWindows, WindowRange


def loader_of(cache, *, micro=2, rank=0, world_size=1, **settings) -> Loader:
    plan = BatchPlan(micro, 1, world_size, sequence_length=4)
    order = Order([WindowRange(0, 0, 1)], seed=1, block_shards=1)
    return Loader(order, cache, plan=plan, rank=rank, ahead=FetchAhead(1), **settings)


def pairs(chosen: ValidationWindows) -> list[tuple[int, int]]:
    return list(zip(chosen.shards.tolist(), chosen.windows.tolist(), strict=True))


def test_windows_are_spaced_evenly_over_all_ranges():
    chosen = ValidationWindows([WindowRange(2, 10, 6), WindowRange(5, 0, 4)], windows=5)
    assert pairs(chosen) == [(2, 10), (2, 12), (2, 14), (5, 0), (5, 2)]
    assert chosen.shards_used() == [2, 5]


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 30), max_size=6), windows=st.integers(1, 100))
def test_as_many_different_windows_are_chosen_as_there_are(counts, windows):
    ranges = [WindowRange(i, i, count) for i, count in enumerate(counts)]
    chosen = pairs(ValidationWindows(ranges, windows=windows))
    everything = [(r.shard, w) for r in ranges for w in range(r.first, r.first + r.count)]
    assert len(chosen) == len(set(chosen)) == min(windows, len(everything))
    assert set(chosen) <= set(everything)
    assert chosen == sorted(chosen)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 3])
def test_ranks_share_the_same_windows_in_equally_many_batches(tmp_path, world_size, micro):
    manifest = FakeManifest.of(41, 30)
    cache = FolderCache(tmp_path, manifest)
    chosen = ValidationWindows([WindowRange(0, 0, 10), WindowRange(1, 1, 6)], windows=7)

    def read(rank: int):
        loader = loader_of(cache, micro=micro, rank=rank, world_size=world_size)
        return list(loader.validation_batches(chosen))

    ranks = [read(rank) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {-(-7 // (micro * world_size))}
    rows = [
        (inputs, labels)
        for batches in ranks
        for batch in batches
        for inputs, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True)
    ]
    real = sorted(inputs for inputs, labels in rows if labels != [IGNORED_LABEL] * 4)
    firsts = [shard * SHARD_STRIDE + window * 4 for shard, window in pairs(chosen)]
    assert real == [list(range(first, first + 4)) for first in firsts]
    assert all(inputs == [0] * 4 for inputs, labels in rows if labels[0] == IGNORED_LABEL)
    again = [batch.input_ids.tolist() for batch in read(0)]
    assert again == [batch.input_ids.tolist() for batch in ranks[0]]


def test_without_validation_windows_there_are_no_batches(tmp_path):
    manifest = FakeManifest.of(9)
    chosen = ValidationWindows([], windows=10)
    assert chosen.shards_used() == []
    loader = loader_of(FolderCache(tmp_path, manifest))
    assert list(loader.validation_batches(chosen)) == []


def test_batches_name_their_source_and_mask_documents(tmp_path):
    manifest = FakeManifest.of(9)
    loader = loader_of(FolderCache(tmp_path, manifest), micro=1, document_id=6)
    chosen = ValidationWindows([WindowRange(0, 1, 1)], windows=1)
    [batch] = loader.validation_batches(chosen, source="web")
    assert batch.source == "web"
    assert batch.labels.tolist() == [[5, IGNORED_LABEL, 7, 8]]
