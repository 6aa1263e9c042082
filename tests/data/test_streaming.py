"""Loader, cache and disk limit together: training streams more than the disk may hold."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_samples import cache_of, settings

from refocused.bucket.bucket import BlobInfo
from refocused.bucket.folder import DirectoryBucket
from refocused.config.batch_plan import BatchPlan
from refocused.data.loader.loader import BatchStream, Loader
from refocused.data.manifest.shard_manifest import build_manifest
from refocused.data.order.sequence_order import Order, choose_block_shards
from refocused.data.order.sequences import Position, split_sequences

LENGTH = 4


def shard_bytes(sequences: int) -> int:
    return 128 + 2 * (LENGTH * sequences + 1)


def sequence_starts(sequences: Sequence[int]) -> list[int]:
    """The first token of each sequence: shards count on from one another."""
    begins = np.cumsum([0, *(LENGTH * count + 1 for count in sequences)])
    return [int(b) + LENGTH * w for b, n in zip(begins, sequences, strict=False) for w in range(n)]


@contextlib.contextmanager
def streams(
    folder: Path,
    sequences: Sequence[int],
    plan: BatchPlan,
    *,
    limit: int,
    block_shards: int,
    ahead: int = 1,
    seen: Callable[[BlobInfo], None] = lambda blob: None,
) -> Iterator[tuple[Order, list[BatchStream]]]:
    """Yield one stream for each rank over shards of so many sequences; the first rank fetches."""

    class Watched(DirectoryBucket):
        def download(self, blob: BlobInfo, target: Path) -> int:
            found = super().download(blob, target)
            seen(blob)
            return found

    source = folder / "source"
    source.mkdir()
    begins = np.cumsum([0, *(LENGTH * count + 1 for count in sequences)])
    for shard, (first, end) in enumerate(itertools.pairwise(begins)):
        np.save(source / f"part_{shard:02d}.npy", np.arange(first, end, dtype=np.uint16))
    times = {"fetch_ahead_shards": ahead, "fetch_ahead_seconds": 0.0, "fetch_timeout_s": 20.0}
    data = settings(disk_limit_gb=(limit + 1) / 1e9, **times)
    bucket, wide = Watched(source), 2**16
    manifest = build_manifest(bucket, data)
    split = split_sequences(manifest, sequence_length=LENGTH)
    with contextlib.ExitStack() as stack:
        caches = [
            cache_of(bucket, folder / "cache", data, vocabulary=wide, fetches=rank == 0)
            for rank in range(plan.world_size)
        ]
        for cache in caches:
            stack.enter_context(cache)
        block_shards = choose_block_shards(
            block_shards,
            sources=[split.train],
            shard_bytes=[caches[0].local_bytes(shard) for shard in range(len(sequences))],
            room_bytes=limit,
        )
        order = Order(split.train, seed=1, block_shards=block_shards)
        found = []
        for rank, cache in enumerate(caches):
            loader = Loader(order, cache, plan=plan, rank=rank, data=data, room_bytes=limit)
            found.append(stack.enter_context(contextlib.closing(loader.batches_from(Position()))))
        yield order, found


def read(found: Sequence[BatchStream], *, sequences: int) -> list[int]:
    """Take steps on all ranks until so many sequences have come; return their first tokens."""
    starts: list[int] = []
    while len(starts) < sequences:
        steps: list[Any] = [stream.next_step() for stream in found]
        for batch in itertools.chain(*steps):
            assert (batch.labels == batch.input_ids + 1).all()
            starts += batch.input_ids[:, 0].tolist()
    return starts


def test_room_for_three_shards_is_enough_for_a_hundred(tmp_path):
    sequences, downloads, most = [100] * 100, [], 0

    def look(blob: BlobInfo) -> None:
        nonlocal most
        downloads.append(blob.name)
        most = max(most, sum(1 for _ in (tmp_path / "cache").rglob("shards/*.npy")))

    plan, limit = BatchPlan(10, 1, 1, LENGTH), 3 * shard_bytes(100)
    with streams(tmp_path, sequences, plan, limit=limit, block_shards=1, seen=look) as (_, found):
        seen = read(found, sequences=10_000)
    assert sorted(seen) == sequence_starts(sequences)
    # The next epoch may have begun to be fetched, with at most as many shards as fit.
    assert len(set(downloads)) == 100
    assert len(downloads) <= 103
    assert 0 < most < 3  # while one more arrives, whose room was reserved


def test_two_ranks_stream_twice_what_the_disk_limit_holds(tmp_path):
    sequences = [40] * 10
    # The cache refuses a plan above the limit: two blocks of 2 fit with one shard ahead, of 10.
    limit, plan = 5 * shard_bytes(40) + 100, BatchPlan(2, 2, 2, LENGTH)
    with streams(tmp_path, sequences, plan, limit=limit, block_shards=0, ahead=3) as (order, found):
        assert order.block_shards == 2
        seen = read(found, sequences=800)
    assert sorted(seen[:400]) == sorted(seen[400:]) == sequence_starts(sequences)


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_reading_waits_for_training_where_small_blocks_follow_one_another(
    tmp_path, micro_batch_size
):
    sequences = [2, 100] * 10  # with room for two long ones, where reading would reach into three
    plan, limit = BatchPlan(micro_batch_size, 1, 1, LENGTH), 2 * shard_bytes(100)
    with streams(tmp_path, sequences, plan, limit=limit, block_shards=1) as (_, found):
        seen = read(found, sequences=1020)
    assert sorted(seen[:1020]) == sequence_starts(sequences)
