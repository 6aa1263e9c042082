"""From the data section to a loader: bucket, manifest, split, order, cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from refocused.batches.batch import Batch
from refocused.batches.loader import Loader
from refocused.batches.order import Order, choose_block_shards
from refocused.batches.validation_windows import ValidationWindows, validation_batches
from refocused.batches.windows import split_windows, window_count
from refocused.bucket.open import open_bucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.shards.cache import ShardCache
from refocused.shards.manifest import Manifest, build_manifest
from refocused.shards.stdlib_text import prepare_stdlib
from refocused.training.state import TrainState
from refocused.world import World


@dataclasses.dataclass(frozen=True, slots=True)
class DataParts:
    """The data of a run, ready to be read.

    Attributes:
        manifest: All shards.
        order: The order of training.
        cache: The node's local shards.
        loader: Gives this rank its batches.
        validation_batches: Yields this rank's validation batches.
        validation_windows: Windows kept for validation.
    """

    manifest: Manifest
    order: Order
    cache: ShardCache
    loader: Loader
    validation_batches: Callable[[], Iterator[Batch]]
    validation_windows: int

    def files_done(self, state: TrainState) -> int:
        """Count the shards of this epoch that are consumed whole: those of finished blocks."""
        here = np.array([state.position.windows])
        block = int(self.order.locate(state.position.epoch, here).blocks[0])
        return block % self.order.blocks_per_epoch * self.order.block_shards


def build_data(
    data: DataConfig,
    *,
    plan: BatchPlan,
    world: World,
    vocabulary: int,
    seed: int,
    evaluation_windows: int,
    credentials_file: Path | None,
    project: str | None,
) -> DataParts:
    """Open the source, describe it on rank 0, and prepare to read it on every rank.

    Args:
        data: The run's data section.
        plan: The batch of a step.
        world: The ranks.
        vocabulary: Ids that the model knows; larger ones in the data are refused.
        seed: Of the order.
        evaluation_windows: Windows of one validation.
        credentials_file: Key file for `gs://`.
        project: Google Cloud project.

    Raises:
        RefocusedError: On every rank alike: the source cannot be read or does not fit the run.
    """
    bucket = world.together(
        lambda: open_bucket(data.source, credentials_file=credentials_file, project=project)
    )
    cache_folder = Path(data.cache)

    def describe() -> Manifest:
        if data.prepare == "python_stdlib":
            prepare_stdlib(bucket)
        return build_manifest(bucket, data, cache_file=cache_folder / "counts.json")

    manifest = world.first_does(describe)
    split = split_windows(
        manifest,
        sequence_length=plan.sequence_length,
        validation_files=data.validation_files,
        validation_fraction=data.validation_fraction,
    )
    chosen = ValidationWindows(split.validation, windows=evaluation_windows)
    sizes = [shard.tokens * np.dtype(shard.dtype).itemsize for shard in manifest.shards]
    room = _room_bytes(data, sizes, pinned=chosen.shards_used())
    blocks = choose_block_shards(
        data.block_shards, ranges=split.train, shard_bytes=sizes, room_bytes=room
    )
    order = Order(split.train, seed=seed, block_shards=blocks)
    cache = ShardCache(
        bucket,
        manifest,
        cache_folder,
        data=data,
        vocabulary=vocabulary,
        fetches=world.is_first_on_node,
    )
    cache.pin(chosen.shards_used())
    names = [shard.name for shard in manifest.shards]
    pin = world.device_kind == "cuda"
    loader = Loader(
        order,
        cache,
        plan=plan,
        rank=world.rank,
        names=names,
        pin=pin,
        ahead=data.fetch_ahead_shards,
        room_bytes=room,
    )
    validation = functools.partial(
        validation_batches,
        chosen,
        cache,
        micro=plan.micro,
        rank=world.rank,
        world_size=world.world_size,
        sequence_length=plan.sequence_length,
        names=names,
        pin=pin,
    )
    return DataParts(manifest, order, cache, loader, validation, window_count(split.validation))


def _room_bytes(data: DataConfig, sizes: Sequence[int], *, pinned: Sequence[int]) -> int | None:
    """Return what the disk limit leaves beside the shards that validate; None without a limit."""
    if data.disk_limit_gb is None:
        return None
    return int(data.disk_limit_gb * 1e9) - sum(sizes[shard] for shard in pinned)
