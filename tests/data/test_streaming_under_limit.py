from __future__ import annotations

import contextlib
import itertools

import numpy as np

from refocused.bucket.folder import DirectoryBucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.data.cache.cache import ShardCache
from refocused.data.loader.loader import Loader
from refocused.data.manifest.shard_manifest import build_manifest
from refocused.data.order.position import Position
from refocused.data.order.window_order import Order, choose_block_shards
from refocused.data.order.windows import split_windows

SHARDS, TOKENS, SEQUENCE_LENGTH = 10, 161, 4
WINDOWS = SHARDS * 40


def test_two_ranks_stream_twice_what_the_disk_limit_holds(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for shard in range(SHARDS):
        tokens = np.arange(TOKENS, dtype=np.uint16) + shard * TOKENS
        np.save(source / f"part_{shard}.npy", tokens)
    bucket = DirectoryBucket(source)
    # The cache refuses a plan above the limit: two blocks of 2 fit with one shard ahead, of 10.
    limit = 5 * (source / "part_0.npy").stat().st_size + 100
    data = DataConfig(
        source=str(source), disk_limit_gb=limit / 1e9, fetch_timeout_s=20.0, fetch_ahead_shards=3
    )
    manifest = build_manifest(bucket, data, cache_file=None)
    split = split_windows(manifest, sequence_length=SEQUENCE_LENGTH)
    plan = BatchPlan(micro=2, accumulation=2, world_size=2, sequence_length=SEQUENCE_LENGTH)

    with contextlib.ExitStack() as stack:
        caches = [
            stack.enter_context(
                ShardCache(
                    bucket,
                    manifest,
                    tmp_path / "cache",
                    data=data,
                    vocabulary=SHARDS * TOKENS,
                    fetches=fetches,
                )
            )
            for fetches in (True, False)
        ]
        block_shards = choose_block_shards(
            0,
            ranges=split.train,
            shard_bytes=[caches[0].local_bytes(i) for i in range(SHARDS)],
            room_bytes=limit,
        )
        assert block_shards == 2
        order = Order(split.train, seed=1, block_shards=block_shards)
        streams = [
            stack.enter_context(
                contextlib.closing(
                    Loader(
                        order,
                        cache,
                        plan=plan,
                        rank=rank,
                        names=[shard.name for shard in manifest.shards],
                        pin=False,
                        ahead=data.fetch_ahead_shards,
                        room_bytes=limit,
                    ).batches_from(Position())
                )
            )
            for rank, cache in enumerate(caches)
        ]
        seen = []
        for _ in range(2 * WINDOWS // plan.windows):
            for batch in itertools.chain(*(stream.next_step() for stream in streams)):
                assert (batch.labels == batch.input_ids + 1).all()
                seen += batch.input_ids[:, 0].tolist()
    firsts = [s * TOKENS + w * SEQUENCE_LENGTH for s in range(SHARDS) for w in range(40)]
    assert sorted(seen[:WINDOWS]) == sorted(seen[WINDOWS:]) == firsts
