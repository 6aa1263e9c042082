import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refocused.bucket.bucket import crc32c_of
from refocused.bucket.folder import DirectoryBucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.data.cache.local_shards import HEADER_BYTES
from refocused.data.loader.open_data import DataParts, build_data
from refocused.data.manifest.shard_manifest import write_manifest
from refocused.data.order.sequence_order import Order
from refocused.data.order.sequences import Position
from refocused.system.errors import ShardError
from refocused.system.world import World

TOKENS = 1000
SHARDS = 4


def built(folder: Path, *, numbers: Iterable[int] = range(SHARDS), **settings: object) -> DataParts:
    (folder / "tokens").mkdir(exist_ok=True)
    for number in numbers:
        ids = np.random.default_rng(number).integers(0, 512, TOKENS)
        np.save(folder / "tokens" / f"{number}.npy", ids.astype(np.int32))
    given = {"source": str(folder / "tokens"), "cache": str(folder / "cache"), **settings}
    return build_data(
        DataConfig.model_validate(given),
        plan=BatchPlan(
            micro_batch_size=2, gradient_accumulation_steps=1, world_size=1, sequence_length=10
        ),
        world=World(),
        vocabulary=512,
        seed=1,
        steps=20,
        evaluation_sequences=8,
    )


@contextlib.contextmanager
def stream_of(data: DataParts, position: Position | None = None) -> Iterator[Any]:
    """Open the batches of a run, and close everything in the end."""
    with (
        contextlib.closing(data.cache),
        contextlib.closing(data.loader.batches_from(position or Position())) as stream,
    ):
        yield stream


def test_room_is_counted_in_the_bytes_of_the_local_form(tmp_path):
    shard = 2 * TOKENS + HEADER_BYTES  # int32 in the source, uint16 on this disk
    for shards, block in ((2, 1), (4, 2)):
        data = built(tmp_path, disk_limit_gb=shards * shard / 1e9, fetch_ahead_shards=1)
        assert isinstance(data.order, Order)
        assert data.order.block_shards == block
        with stream_of(data) as stream:
            assert len(stream.next_step()) == 1
    with pytest.raises(ShardError, match="two blocks of 1 shards"):
        built(tmp_path, disk_limit_gb=(2 * shard - 1) / 1e9)


def test_a_missing_shard_in_the_manifest_can_be_skipped(tmp_path):
    data = built(tmp_path)
    data.cache.close()
    bucket = DirectoryBucket(tmp_path / "tokens")
    rows = (
        dataclasses.replace(shard, crc32c=crc32c_of(tmp_path / "tokens" / shard.name), sample=None)
        for shard in data.manifest.shards
    )
    write_manifest(bucket, dataclasses.replace(data.manifest, shards=tuple(rows)))
    before = built(tmp_path)
    before.cache.close()
    (tmp_path / "tokens" / "2.npy").unlink()

    def without(**settings: object) -> DataParts:
        return built(tmp_path, numbers=(0, 1, 3), **settings)

    with pytest.raises(ShardError, match=r"2\.npy is missing.*data\.skip"):
        without()
    data = without(skip=["2.npy"])
    assert data.manifest.fingerprint == before.manifest.fingerprint
    assert data.order_text == before.order_text
    with stream_of(data, Position(0, 7)) as stream:
        shards = {shard for _ in range(100) for one in stream.next_step() for shard in one.shards}
        assert shards == {0, 1, 3}
        assert not list(tmp_path.rglob("cache/shards/2.npy.*.npy"))
