"""Open the data of a run: manifest, order, cache and loader; and iterate it in other loops."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import pydantic
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.open_bucket import open_bucket
from refocused.config.batch_plan import BatchPlan
from refocused.config.data import PYTHON_STDLIB, DataConfig
from refocused.config.load_run import load_run
from refocused.data.cache.cache import ShardCache
from refocused.data.loader.batch import Batch
from refocused.data.loader.loader import BatchStream, DeviceCopier, Loader
from refocused.data.manifest.run_manifest import describe_run
from refocused.data.manifest.shard_manifest import Manifest
from refocused.data.manifest.stdlib_text import prepare_stdlib
from refocused.data.manifest.vocabulary import decide_vocabulary
from refocused.data.order.mixture_order import Mixture
from refocused.data.order.sequence_order import Order
from refocused.data.order.sequences import Position
from refocused.data.order.sources import (
    ENDLESS_STEPS,
    Source,
    describe_mixture,
    describe_order,
    files_done,
    order_sources,
    split_sources,
    validation_fingerprint,
)
from refocused.system.errors import CheckpointError, ConfigError, ShardError, local_path
from refocused.system.world import World

ANY_ID = 1 << 32  # a vocabulary that holds every id of a token file


@dataclasses.dataclass(frozen=True, slots=True)
class DataParts:
    """The data of a run, ready to be read; close `cache` to end its threads."""

    manifest: Manifest  # all shards
    sources: Sequence[Source]  # the sequences of each source; a run without a mixture has one
    order: Order | Mixture  # the order of training
    order_text: str  # what decides the order, besides the data and the mixture
    cache: ShardCache  # the machine's local shards
    loader: Loader  # gives this rank its batches
    validation_set: str  # fingerprint of what is validated on; empty: nothing

    @property
    def epoch_sequences(self) -> Mapping[str, int]:
        """Sequences of one epoch of each source of a mixture, by name; empty without one."""
        return {source.name: source.sequences for source in self.sources if source.name is not None}

    def validation_batches(self) -> Iterator[Batch]:
        """Yield this rank's validation batches, source by source."""
        for source in self.sources:
            yield from self.loader.validation_batches(source.validation, source=source.name)

    def files_done(self, position: Position) -> int:
        """Count the shards consumed completely in the present epoch of each source."""
        if isinstance(self.order, Order):
            return files_done(self.order, self.order.number_of(position))
        orders, consumed = self.order.orders, position.sources or {}
        return sum(files_done(order, consumed.get(name, 0)) for name, order in orders.items())


def build_data(
    data: DataConfig,
    *,
    plan: BatchPlan,
    world: World,
    vocabulary: int,
    seed: int,
    steps: int,
    evaluation_sequences: int,
    open_source: Callable[[str], Bucket] = open_bucket,
    rank: int | None = None,
) -> DataParts:
    """Open the sources, describe them on rank 0, and prepare to read them on every rank.

    All ranks of `world` call together; a process alone passes `World()`, and as `rank` which of the
    `plan.world_size` shares of the stream it reads. Larger ids than `vocabulary` are an error.
    `steps` of the run are checked to fit `data.disk_limit_gb`.

    Raises:
        RefocusedError: On every rank: a source cannot be read or does not fit the run.
    """
    urls = {name: source.address for name, source in data.by_source.items()}
    buckets = world.on_all_ranks(lambda: {name: open_source(url) for name, url in urls.items()})
    manifest = world.on_rank_0(lambda: describe_sources(buckets, data))
    if world.local_world_size < world.world_size:
        is_other = world.is_local_rank_0 and not world.is_rank_0
        world.on_all_ranks(lambda: _compare(buckets, data, manifest) if is_other else None)
    sources = split_sources(
        manifest,
        data,
        sequence_length=plan.sequence_length,
        evaluation_sequences=evaluation_sequences,
    )
    pinned = {shard for source in sources for shard in source.validation.shards.tolist()}
    cache = ShardCache(
        buckets,
        manifest,
        Path(data.cache),
        data=data,
        vocabulary=vocabulary,
        fetches=world.is_local_rank_0,
    )
    room = cache.room_for_training(pinned)
    order = order_sources(
        sources,
        data,
        seed=seed,
        plan=plan,
        steps=steps,
        shard_bytes=[cache.local_bytes(shard) for shard in range(len(manifest.shards))],
        room_bytes=room,
    )
    cache.pin(pinned)
    on_gpu = world.device_kind == "cuda"
    loader = Loader(
        order,
        cache,
        plan=plan,
        rank=world.rank if rank is None else rank,
        data=data,
        room_bytes=room,
        pin=on_gpu,
        copier=DeviceCopier(world.device) if on_gpu else None,
    )
    length = plan.sequence_length
    order_text = describe_order(
        order, manifest=manifest, seed=seed, sequence_length=length, document_id=data.masked_id
    )
    validation_set = validation_fingerprint(
        sources, manifest, sequence_length=length, document_id=data.masked_id
    )
    return DataParts(manifest, sources, order, order_text, cache, loader, validation_set)


def describe_sources(buckets: Mapping[str, Bucket], data: DataConfig) -> Manifest:
    """Describe a run's shards as `describe_run`; keep counts, and prepare text if it has any."""
    counts_file = Path(data.cache) / "counts.json"
    for name, source in data.by_source.items():
        if source.source == PYTHON_STDLIB:
            prepare_stdlib(buckets[name])
    return describe_run(buckets, data, cache_file=counts_file)


def _compare(buckets: Mapping[str, Bucket], data: DataConfig, first: Manifest) -> None:
    """Refuse other files in this machine's folder than in rank 0's; a store is the same for all."""
    if not all(isinstance(bucket, DirectoryBucket) for bucket in buckets.values()):
        return
    local_rows, first_rows = (
        {shard.name: shard.fingerprint_row() for shard in manifest.shards}
        for manifest in (describe_sources(buckets, data), first)
    )
    names = local_rows | first_rows
    odd = sorted(name for name in names if local_rows.get(name) != first_rows.get(name))
    if odd:
        raise ShardError(
            f"{data.source or 'data.mixture'} has other data than on rank 0's machine: {odd[0]} is "
            f"{'another file' if odd[0] in local_rows else 'missing'} (differing files: "
            f"{len(odd):,}). Copy the same files to all machines."
        )


class TokenLoader(IterableDataset[tuple[Tensor, Tensor]]):
    """Iterate token files in exactly the trainer's order, on any number of ranks.

    Yields `(input_ids, labels)`, both int64 of shape `[batch_size, sequence_length]`, on the CPU.
    Label t is the token after input t: not for transformers models, which shift labels themselves.
    With `mask_documents` the label at the end of a document is -100.

    Each rank makes a loader; together they divide one stream of sequences, so Accelerate must not
    `prepare` them. Iterating again continues the stream. Threads read ahead: `close()` the loader,
    or use it in a `with` statement. A `DataLoader` takes it with `batch_size=None, num_workers=0`.

    Args:
        source: Folder or `gs://bucket/prefix` of token files, or a mixture, as
            `{"web": {"source": "gs://bucket/web", "weight": 3}, "code": {...}}`.
        sequence_length: Tokens a sequence trains on.
        batch_size: Sequences of a batch on one rank.
        rank: Number of this process among the `world_size` that share the stream.
        seed: As `run.seed`.
        epochs: Passes over the data before the stream ends; None: endless, as in training.
        vocabulary: Token ids of the model; larger ids are an error. None: any id.
        validation_sequences: As `evaluation.sequences`; `disk_limit_gb` leaves room for their
        shards. **data: Settings of the data section, such as `dtype`, `validation_fraction` or
        `cache`.

    Raises:
        ConfigError: An argument, or a setting of the data section, is wrong.
        RefocusedError: The source cannot be read, or does not fit.
    """

    def __init__(
        self,
        source: str | Path | Mapping[str, Mapping[str, Any]],
        *,
        sequence_length: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 1337,
        epochs: int | None = None,
        vocabulary: int | None = None,
        validation_sequences: int = 0,
        **data: Any,
    ) -> None:
        super().__init__()
        if not (0 <= rank < world_size and batch_size >= 1 and sequence_length >= 1):
            sizes = f"batch_size {batch_size}, sequence_length {sequence_length}"
            raise ConfigError(f"rank {rank} of {world_size}, {sizes}: out of range.")
        where = {"mixture": source} if isinstance(source, Mapping) else {"source": str(source)}
        try:
            section = DataConfig.model_validate({**where, **data})
        except pydantic.ValidationError as error:
            wrong = [f"{'.'.join(map(str, row['loc']))}: {row['msg']}" for row in error.errors()]
            raise ConfigError(f"TokenLoader: {'; '.join(wrong)}.") from None
        if any(stage.from_step is not None for stage in section.stages.values()):
            raise ConfigError("TokenLoader: give stages by from_tokens, not by steps of a batch.")
        self._data = build_data(
            section,
            plan=BatchPlan(batch_size, 1, world_size, sequence_length),
            world=World(),  # each process opens the source for itself
            vocabulary=vocabulary or ANY_ID,
            seed=seed,
            steps=ENDLESS_STEPS,
            evaluation_sequences=validation_sequences,
            rank=rank,
        )
        self._epochs = epochs
        self._stream: BatchStream | None = None
        self.position = Position()  # after the last batch of all ranks

    @classmethod
    def from_run(cls, run: str | Path, **others: Any) -> Self:
        """Make the loader of a run: its data, seed, sequence length and vocabulary.

        `run` is a run's folder, a run file or the name of a shipped one, such as `demo`. `others`
        are other arguments of `TokenLoader`, at least `batch_size`. Stages by `from_step` begin
        where the run's steps do, for which `batch.global_batch_size` has to be set and constant.
        """
        file = local_path(run) / "run.yaml"
        loaded = decide_vocabulary(load_run(file if file.is_file() else run), open_bucket)
        config, data = loaded.config, loaded.config.data.model_dump()
        mixture, source, batch = data.pop("mixture"), data.pop("source"), config.batch
        for name, stage in data["stages"].items():
            if (steps := stage["from_step"]) is not None and "stages" not in others:
                if batch.global_batch_size is None or batch.warmup_steps:
                    raise ConfigError(
                        f"data.stages.{name}.from_step={steps}: the number of ranks decides how "
                        "many sequences so many steps take. Set batch.global_batch_size without "
                        "batch.warmup_steps, or give stages= with from_tokens."
                    )
                tokens = steps * batch.global_batch_size * config.model.sequence_length
                stage |= {"from_step": None, "from_tokens": tokens}
        return cls(
            mixture or source,
            sequence_length=config.model.sequence_length,
            seed=config.run.seed,
            vocabulary=loaded.shape.vocabulary,
            validation_sequences=config.evaluation.sequences,
            **{**data, **others},
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches from the present position on."""
        if get_worker_info() is not None:
            self.__reduce__()
        self._stop_reading()
        stream = self._stream = self._data.loader.batches_from(self.position)
        try:
            while batches := stream.next_step():
                after = stream.position
                if self._epochs and (after.epoch, after.sequences) > (self._epochs, 0):
                    return
                self.position = after
                yield batches[0].input_ids, batches[0].labels
        finally:
            stream.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch, for JSON; the same on every rank.

        It counts the sequences of all ranks: any number of ranks, with any batch size, can
        continue.
        """
        return {
            "position": self.position.to_dict(),
            "data": self._data.manifest.fingerprint,
            "order": self._data.order_text,
            "mixture": describe_mixture(self._data.order),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position, without reading what comes before it.

        Raises:
            CheckpointError: The state is of other data or of another order.
        """
        for name, current in self.state_dict().items():
            if name != "position" and state.get(name) != current:
                raise CheckpointError(
                    f"The state was saved with {name} {state.get(name)!r}, and this loader has "
                    f"{current!r}. Open the same data with the same settings."
                )
        self._stop_reading()
        self.position = Position.from_dict(state["position"])

    def close(self) -> None:
        """End the threads; what was downloaded stays in the cache."""
        self._stop_reading()
        self._data.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "A TokenLoader reads ahead by threads and cannot be copied into worker processes. "
            "Iterate it directly, or use DataLoader(loader, batch_size=None, num_workers=0)."
        )

    def _stop_reading(self) -> None:
        if self._stream is not None:
            self._stream.close()
