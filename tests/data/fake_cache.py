import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.data.cache.fetch_plan import ShardPlanner
from refocused.data.cache.local_shards import TokenFile
from refocused.data.loader.loader import Loader
from refocused.data.manifest.shard_manifest import Manifest, Shard
from refocused.data.order.mixture_order import Mixture
from refocused.data.order.sequence_order import Order
from refocused.data.order.sequences import split_sequences
from refocused.system.errors import ShardError

SHARD_STRIDE = 1000  # token t of shard s is s * SHARD_STRIDE + t


def manifest_of(*tokens: int, wide: int | None = None) -> Manifest:
    """A manifest of shards with the given numbers of tokens; shard `wide` has uint32."""
    kinds = ["uint32" if index == wide else "uint16" for index in range(len(tokens))]
    rows = (
        Shard(f"part_{index}.npy", count, kind, 1, None, None)
        for index, (count, kind) in enumerate(zip(tokens, kinds, strict=True))
    )
    return Manifest(tuple(rows), "bytes")


class FolderCache:
    """Opens only shards of the last plan; one may be `broken`, and one `late`."""

    def __init__(self, folder: Path, manifest: Manifest, *, vocabulary: int = 1 << 32) -> None:
        self.vocabulary = vocabulary
        self.names = [shard.name for shard in manifest.shards]
        self.plans: list[list[int]] = []
        self.reads = 0
        self.broken: int | None = None
        self.late: int | None = None
        self.arrived = threading.Event()
        self.waiting = threading.Event()
        self._folder = folder
        self._manifest = manifest
        for index, shard in enumerate(manifest.shards):
            tokens = np.arange(shard.tokens) + index * SHARD_STRIDE
            np.save(folder / shard.name, tokens.astype(shard.dtype))

    def plan(self, needed: Sequence[int]) -> None:
        self.plans.append(list(needed))

    def local_bytes(self, index: int) -> int:
        return 2 * self._manifest.shards[index].tokens

    def open(self, index: int) -> TokenFile:
        name = self.names[index]
        if index == self.broken:
            raise ShardError(f"{name} is broken. Fetch it again.")
        if index == self.late:
            self.waiting.set()
            self.arrived.wait()
        if self.plans and index not in self.plans[-1]:
            raise ShardError(f"shard {index} was opened, but the plan is {self.plans[-1]}")
        self.reads += 1
        return TokenFile(self._folder / name, name=name)


def order_of(manifest: Manifest, *, sequence_length: int = 4, block_shards: int = 2) -> Order:
    split = split_sequences(manifest, sequence_length=sequence_length)
    return Order(split.train, seed=5, block_shards=block_shards)


def loader_of(
    cache: FolderCache,
    order: Order | Mixture,
    *,
    micro_batch_size=2,
    gradient_accumulation_steps=2,
    world_size=1,
    rank=0,
    **others,
) -> Loader:
    """A loader of sequences of 4 tokens."""
    plan = BatchPlan(
        micro_batch_size, gradient_accumulation_steps, world_size, others.pop("sequence_length", 4)
    )
    document_id = others.pop("document_id", None)
    data = ahead(1, document_id=document_id, mask_documents=document_id is not None)
    return Loader(order, cast("Any", cache), plan=plan, rank=rank, data=data, **others)


def ahead(shards: int, *, seconds: float = 0.0, **changes: Any) -> DataConfig:
    """Settings that fetch so many shards ahead of use, or for so many seconds."""
    times = {"fetch_ahead_shards": shards, "fetch_ahead_seconds": seconds}
    return DataConfig(source="x", **changes).model_copy(update=times)  # also none


def planner_of(
    stream: Any, data: DataConfig, *, room: int | None = None, clock: Any = lambda: 0.0
) -> tuple[ShardPlanner, list[list[int]]]:
    """A planner over shards of 10 bytes, and its plans."""
    plans: list[list[int]] = []
    cache: Any = SimpleNamespace(
        plan=lambda needed: plans.append(list(needed)), local_bytes=lambda index: 10
    )
    limits = {"data": data, "room_bytes": room}
    planner = ShardPlanner(stream, cache, **limits, step_sequences=4, clock=clock)
    return planner, plans


def wanted(
    stream: Any, *, oldest: int, newest: int, shards: int, room: int | None = None, **limits: Any
) -> list[int]:
    """The plan while training is in block `oldest` and reading in `newest`."""
    planner, plans = planner_of(stream, ahead(shards, **limits), room=room)
    planner.reading(oldest, newest)
    return plans[-1]
