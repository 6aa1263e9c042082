from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from refocused.bucket.folder import DirectoryBucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.data.cache.cache import ShardCache
from refocused.data.loader.loader import Loader
from refocused.data.manifest.shard_manifest import build_manifest
from refocused.data.order.position import Position
from refocused.data.order.window_order import Order
from refocused.data.order.windows import split_windows

SEQUENCE_LENGTH, LONG, SHORT, SHARDS = 4, 100, 2, 20


@contextlib.contextmanager
def opened(tmp_path: Path, *, windows: int):
    """Yield a stream with room for two long shards, where reading ahead would reach into three."""
    source = tmp_path / "source"
    source.mkdir()
    for shard in range(SHARDS):
        count = (LONG if shard % 2 else SHORT) * SEQUENCE_LENGTH + 1
        tokens = np.arange(count, dtype=np.uint16) + shard * (LONG * SEQUENCE_LENGTH + 1)
        np.save(source / f"part_{shard:02d}.npy", tokens)
    bucket = DirectoryBucket(source)
    limit = 2 * (source / "part_01.npy").stat().st_size
    data = DataConfig(
        source=str(source), disk_limit_gb=(limit + 1) / 1e9, block_shards=1, fetch_timeout_s=20.0
    )
    manifest = build_manifest(bucket, data, cache_file=None)
    split = split_windows(manifest, sequence_length=SEQUENCE_LENGTH)
    order = Order(split.train, seed=1, block_shards=1)
    cache = ShardCache(
        bucket, manifest, tmp_path / "cache", data=data, vocabulary=2**16, fetches=True
    )
    loader = Loader(
        order,
        cache,
        plan=BatchPlan(windows, 1, 1, SEQUENCE_LENGTH),
        rank=0,
        names=[shard.name for shard in manifest.shards],
        pin=False,
        ahead=1,
        room_bytes=limit,
    )
    with cache, contextlib.closing(loader.batches_from(Position())) as stream:
        yield order, stream


@pytest.mark.parametrize("windows", [1, 3])
def test_reading_waits_for_training_where_small_blocks_follow_one_another(
    tmp_path: Path, windows: int
) -> None:
    with opened(tmp_path, windows=windows) as (order, stream):
        seen = []
        while len(seen) < order.windows_per_epoch:
            for batch in stream.next_step():
                seen += batch.input_ids[:, 0].tolist()
    assert len(set(seen[: order.windows_per_epoch])) == SHARDS // 2 * (LONG + SHORT)
