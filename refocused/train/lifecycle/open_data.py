"""From the data section to a loader: bucket, manifest, split, order, cache."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.bucket.open_bucket import open_bucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.data.cache.cache import ShardCache
from refocused.data.cache.fetch_plan import FetchAhead
from refocused.data.cache.local_shards import local_bytes
from refocused.data.loader.batch import Batch
from refocused.data.loader.loader import Loader
from refocused.data.loader.prefetch import DeviceCopier
from refocused.data.manifest.run_manifest import build_mixed_manifest, build_run_manifest
from refocused.data.manifest.shard_manifest import Manifest
from refocused.data.manifest.stdlib_text import prepare_stdlib
from refocused.data.order.mixture_order import Mixture
from refocused.data.order.sources import (
    Source,
    describe_order,
    files_done,
    order_sources,
    split_sources,
)
from refocused.data.order.window_order import Order
from refocused.system.world import World
from refocused.train.step.state import TrainState


@dataclasses.dataclass(frozen=True, slots=True)
class DataParts:
    """The data of a run, ready to be read."""

    manifest: Manifest  # all shards
    sources: Sequence[Source]  # the windows of each source; a run without a mixture has one
    order: Order | Mixture  # the order of training
    order_text: str  # what decides the order, besides the data and the mixture
    cache: ShardCache  # the machine's local shards
    loader: Loader  # gives this rank its batches
    validation_batches: Callable[[], Iterator[Batch]]  # yields this rank's validation batches

    @property
    def epoch_windows(self) -> Mapping[str, int]:
        """Windows of one epoch of each source of a mixture, by name; empty without one."""
        return {source.name: source.windows for source in self.sources if source.name is not None}

    def files_done(self, state: TrainState) -> int:
        """Count the shards that are consumed completely in the present epoch of each source."""
        if isinstance(self.order, Order):
            return files_done(self.order, self.order.number_of(state.position))
        consumed = state.position.sources or {}
        return sum(
            files_done(order, consumed.get(name, 0)) for name, order in self.order.orders.items()
        )


def build_data(
    data: DataConfig,
    *,
    plan: BatchPlan,
    world: World,
    vocabulary: int,
    seed: int,
    steps: int,
    evaluation_windows: int,
    open_source: Callable[[str], Bucket] = open_bucket,
) -> DataParts:
    """Open the source, describe it on rank 0, and prepare to read it on every rank.

    Ids in the data beyond `vocabulary` are refused. A validation has `evaluation_windows`.

    Raises:
        RefocusedError: On every rank alike: the source cannot be read or does not fit the run.
    """
    source = world.on_all_ranks(lambda: _open_sources(data, open_source))
    cache_folder = Path(data.cache)
    manifest = world.on_rank_0(lambda: _describe(source, data, cache_folder / "counts.json"))
    sources = split_sources(
        manifest, data, sequence_length=plan.sequence_length, evaluation_windows=evaluation_windows
    )
    pinned = [shard for source in sources for shard in source.validation.shards_used()]
    sizes = [local_bytes(shard, vocabulary=vocabulary) for shard in manifest.shards]
    limit = data.disk_limit_gb
    room = None if limit is None else int(limit * 1e9) - sum(sizes[shard] for shard in pinned)
    order = order_sources(
        sources,
        data,
        seed=seed,
        step_windows=plan.windows,
        steps=steps,
        shard_bytes=sizes,
        room_bytes=room,
    )
    cache = ShardCache(
        source,
        manifest,
        cache_folder,
        data=data,
        vocabulary=vocabulary,
        fetches=world.is_local_rank_0,
    )
    cache.pin(pinned)
    pin = world.device_kind == "cuda"
    document_id = data.document_id if data.mask_documents else None
    loader = Loader(
        order,
        cache,
        plan=plan,
        rank=world.rank,
        ahead=FetchAhead(
            data.fetch_ahead_shards,
            seconds=data.fetch_ahead_seconds,
            bytes=None if data.fetch_ahead_gb is None else int(data.fetch_ahead_gb * 1e9),
            room_bytes=room,
        ),
        pin=pin,
        document_id=document_id,
        copier=DeviceCopier(world.device) if pin else None,
    )
    return DataParts(
        manifest,
        sources,
        order,
        describe_order(
            order,
            manifest=manifest,
            seed=seed,
            sequence_length=plan.sequence_length,
            document_id=document_id,
        ),
        cache,
        loader,
        lambda: itertools.chain.from_iterable(
            loader.validation_batches(source.validation, source=source.name) for source in sources
        ),
    )


def _open_sources(
    data: DataConfig, open_source: Callable[[str], Bucket]
) -> Bucket | dict[str, Bucket]:
    if data.source is not None:
        return open_source(data.source)
    return {name: open_source(one.source) for name, one in data.mixture.items()}


def _describe(source: Bucket | dict[str, Bucket], data: DataConfig, counts_file: Path) -> Manifest:
    if isinstance(source, dict):
        return build_mixed_manifest(source, data, cache_file=counts_file)
    if data.prepare == "python_stdlib":
        prepare_stdlib(source)
    return build_run_manifest(source, data, cache_file=counts_file)
