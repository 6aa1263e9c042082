"""The sources of a run: windows, order and share of each, and which shards a step may reach."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from refocused.config.data import DataConfig
from refocused.data.manifest.run_manifest import split_by_source
from refocused.data.manifest.select_files import is_skipped
from refocused.data.manifest.shard_manifest import Manifest
from refocused.data.order.mixture_order import PERIOD, Mixture, shares_of, source_seed
from refocused.data.order.window_order import Order, choose_block_shards
from refocused.data.order.windows import ValidationWindows, WindowRange, split_windows, window_count
from refocused.system.errors import ShardError

MOST_EPOCHS = 1000  # to look at: more than any run that streams makes, in a second at most
PACKING_CHARACTERS = 8
# Windows of a source that a step may hold or look at beyond its share: at most one at each end (see
# `interleaved`), and the one that comes next.
SHARE_MARGIN = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """The windows of one source."""

    name: str | None  # None for the only source of a run without a mixture
    share: int  # windows of it in 1,024
    train: Sequence[WindowRange]  # by shards of the run's manifest
    kept: int  # windows kept for validation
    validation: ValidationWindows  # those of them that are validated on
    skipped: frozenset[int] = frozenset()  # shards that `data.skip` leaves out, of all sources

    @property
    def windows(self) -> int:
        """Windows that train: those of one epoch, the skipped ones included."""
        return window_count(self.train)

    @property
    def skipped_windows(self) -> int:
        """Windows of an epoch that are left out."""
        return window_count(one for one in self.train if one.shard in self.skipped)


def split_sources(
    manifest: Manifest, data: DataConfig, *, sequence_length: int, evaluation_windows: int
) -> list[Source]:
    """Divide each source's windows into those that train and those that validate.

    A validation takes its windows from the sources by their shares, at least one from each that
    keeps any. Raises `ShardError` if a pattern names no shard, or no window is left to train or
    validate on.
    """
    for pattern in data.skip:
        one = data.model_copy(update={"skip": (pattern,)})
        if not any(is_skipped(shard, one) for shard in manifest.shards):
            raise ShardError(
                f"data.skip: {pattern!r} fits none of the {len(manifest.shards)} token files. "
                "Correct the pattern; it may fit a file's name with or without its folder."
            )
    skipped = frozenset(i for i, shard in enumerate(manifest.shards) if is_skipped(shard, data))
    shares, parts = {"": PERIOD}, {"": (0, manifest)}
    if data.mixture:
        shares = shares_of({name: one.weight for name, one in data.mixture.items()})
        parts = split_by_source(manifest)
    sources = []
    for name, (first_shard, own) in parts.items():
        windows, config, of_source = evaluation_windows, data, ""
        if name:
            windows = max(1, round(evaluation_windows * shares[name] / PERIOD))
            config, of_source = data.of_source(name), f" of the source {name}"
        try:
            split = split_windows(
                own,
                sequence_length=sequence_length,
                validation_files=config.validation_files,
                validation_fraction=config.validation_fraction,
                first_shard=first_shard,
            )
        except ShardError as error:
            raise ShardError(f"data.mixture.{name}: {error}" if name else str(error)) from None
        source = Source(
            name=name or None,
            share=shares[name],
            train=split.train,
            kept=window_count(split.validation),
            validation=ValidationWindows(split.validation, windows=windows, skipped=skipped),
            skipped=skipped,
        )
        unvalidated = windows and source.kept and not len(source.validation.windows)
        untrained = source.skipped_windows == source.windows
        for is_lost, verb in ((untrained, "train"), (unvalidated, "validate")):
            if is_lost:
                raise ShardError(
                    f"data.skip leaves no window{of_source} to {verb} on. Skip fewer shards."
                )
        sources.append(source)
    return sources


def order_sources(
    sources: Sequence[Source],
    data: DataConfig,
    *,
    seed: int,
    step_windows: int,
    steps: int,
    shard_bytes: Sequence[int],
    room_bytes: int | None,
) -> Order | Mixture:
    """Return the order of the only source, or of all woven together.

    A step has `step_windows` windows over all ranks. `shard_bytes` are the local sizes of the
    manifest's shards, of which those that train may take `room_bytes` on disk. Raises `ShardError`
    if two blocks of each source, or those of a step, do not fit into the room.
    """
    block_shards = choose_block_shards(
        data.block_shards,
        sources=[source.train for source in sources],
        shard_bytes=shard_bytes,
        room_bytes=room_bytes,
    )
    orders = [
        Order(
            source.train,
            seed=seed if source.name is None else source_seed(seed, source.name),
            block_shards=block_shards,
            skipped=source.skipped,
        )
        for source in sources
    ]
    if room_bytes is not None:
        needed = 0
        for source, order in zip(sources, orders, strict=True):
            own_windows = step_windows
            if source.share < PERIOD:
                own_windows = step_windows * source.share // PERIOD + SHARE_MARGIN
            reach = most_bytes_of_a_step(
                order,
                step_windows=own_windows,
                windows=steps * step_windows * source.share // PERIOD + 1,
                shard_bytes=shard_bytes,
            )
            largest = sorted((shard_bytes[one.shard] for one in source.train), reverse=True)
            needed += max(reach, sum(largest[: 2 * block_shards]))
        if needed > room_bytes:
            raise ShardError(
                f"a step of {step_windows:,} windows can reach over short shards into more than "
                f"two blocks of {block_shards} shards, which take up to {needed:,} bytes on disk, "
                f"and data.disk_limit_gb leaves {room_bytes:,} beside the shards that validate. "
                "Raise data.disk_limit_gb by at least "
                f"{math.ceil((needed - room_bytes) / 1e6) / 1e3}, or make shards of even length."
            )
    if not data.mixture:
        return orders[0]
    weights = {name: one.weight for name, one in data.mixture.items()}
    named = {str(source.name): order for source, order in zip(sources, orders, strict=True)}
    return Mixture(named, weights=weights, seed=seed)


def most_bytes_of_a_step(
    order: Order, *, step_windows: int, windows: int, shard_bytes: Sequence[int]
) -> int:
    """Return the most bytes that a step over three blocks or more needs; 0 where none is.

    Steps are looked at wherever they may begin, since a resume with another batch shifts them: of
    those that begin in a block the one that begins with its last window reaches farthest.
    `step_windows` and `windows` are those of one source in a step and in the run.
    """
    most, per_epoch = 0, order.blocks_per_epoch
    if step_windows - 2 < order.smallest_block:
        return most
    for epoch in range(min(MOST_EPOCHS, math.ceil(windows / order.windows_per_epoch))):
        firsts = epoch * per_epoch + np.arange(per_epoch)
        begins = np.array([order.block_start(first + 1) - 1 for first in firsts.tolist()])
        lasts = order.blocks_of(begins + step_windows - 1)
        # Within two epochs all shards have come; a shard that comes again counts once.
        lasts = np.where(lasts - firsts > 1, np.minimum(lasts, firsts + 2 * per_epoch), firsts)
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            if first < last:
                shards = set(order.shards_between(first, last))
                most = max(most, sum(shard_bytes[shard] for shard in shards))
    return most


def describe_order(
    order: Order | Mixture,
    *,
    manifest: Manifest,
    seed: int,
    sequence_length: int,
    document_id: int | None,
) -> str:
    """Return what decides, beside the data and the shares of a mixture, which window comes when.

    A resume is refused where this text differs.
    """
    one = next(iter(order.orders.values())) if isinstance(order, Mixture) else order
    windows = (
        ", ".join(f"{name} {own.windows_per_epoch}" for name, own in order.orders.items())
        if isinstance(order, Mixture)
        else str(order.windows_per_epoch)
    )
    documents = "" if document_id is None else f", documents masked by id {document_id}"
    is_packed = any(shard.parts for shard in manifest.shards)
    packing = f", chunks packed as {manifest.packing[:PACKING_CHARACTERS]}" if is_packed else ""
    return (
        f"seed {seed}, blocks of {one.block_shards} shards, {windows} windows of "
        f"{sequence_length} tokens{documents}{packing}"
    )


def describe_mixture(order: Order | Mixture) -> str:
    """Return the shares of a mixture's sources; nothing without one."""
    if not isinstance(order, Mixture):
        return ""
    shares = ", ".join(f"{name} {share}" for name, share in order.shares.items())
    return f"{shares} of {PERIOD} windows"


def files_done(order: Order, consumed: int) -> int:
    """Count the shards of a source's present epoch that are consumed whole, block by block."""
    block = int(order.blocks_of(np.array([consumed]))[0])
    return block % order.blocks_per_epoch * order.block_shards
