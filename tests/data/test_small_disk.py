from __future__ import annotations

import contextlib
import threading
from collections import Counter
from pathlib import Path

import numpy as np

from refocused.bucket.bucket import BlobInfo
from refocused.bucket.folder import DirectoryBucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.data.cache.cache import ShardCache
from refocused.data.loader.loader import Loader
from refocused.data.manifest.shard_manifest import build_manifest
from refocused.data.order.position import Position
from refocused.data.order.window_order import Order
from refocused.data.order.windows import split_windows

SHARDS, TOKENS, SEQUENCE_LENGTH = 100, 401, 4
SHARD_BYTES = 2 * TOKENS + 128


class CountingBucket(DirectoryBucket):
    """Counts downloads, and looks at the disk at the moment of each."""

    def __init__(self, source: Path, cache: Path) -> None:
        super().__init__(source)
        self.downloads: Counter[str] = Counter()
        self.most_shards = 0
        self._cache = cache
        self._lock = threading.Lock()

    def download(self, blob: BlobInfo, target: Path) -> int:
        crc32c = super().download(blob, target)
        with self._lock:
            self.downloads[blob.name] += 1
            there = sum(1 for _ in self._cache.rglob("shards/*.npy"))
            self.most_shards = max(self.most_shards, there)
        return crc32c


def test_room_for_three_shards_is_enough_for_a_hundred(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    for shard in range(SHARDS):
        tokens = np.arange(TOKENS, dtype=np.uint16) + shard * TOKENS
        np.save(source / f"part_{shard:02d}.npy", tokens)
    bucket = CountingBucket(source, folder)
    limit = 3 * SHARD_BYTES
    data = DataConfig(
        source=str(source),
        disk_limit_gb=(limit + 1) / 1e9,
        block_shards=1,
        fetch_ahead_shards=1,
        fetch_threads=2,
        fetch_timeout_s=20.0,
    )
    manifest = build_manifest(bucket, data, cache_file=None)
    order = Order(
        split_windows(manifest, sequence_length=SEQUENCE_LENGTH).train, seed=1, block_shards=1
    )
    plan = BatchPlan(micro=10, accumulation=1, world_size=1, sequence_length=SEQUENCE_LENGTH)
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(
            ShardCache(bucket, manifest, folder, data=data, vocabulary=2**16, fetches=True)
        )
        loader = Loader(
            order,
            cache,
            plan=plan,
            rank=0,
            names=[shard.name for shard in manifest.shards],
            pin=False,
            ahead=data.fetch_ahead_shards,
            room_bytes=limit,
        )
        stream = stack.enter_context(contextlib.closing(loader.batches_from(Position())))
        seen = []
        for _ in range(order.windows_per_epoch // plan.windows):
            (batch,) = stream.next_step()
            seen += batch.input_ids[:, 0].tolist()
    firsts = [s * TOKENS + w * SEQUENCE_LENGTH for s in range(SHARDS) for w in range(100)]
    assert sorted(seen) == firsts
    # The next epoch may have begun to be fetched, with at most as many shards as fit.
    again = Counter(bucket.downloads.values())
    assert again[1] + again[2] == SHARDS
    assert again[2] <= 3
    assert 0 < bucket.most_shards < 3  # while one more arrives, whose room was reserved
