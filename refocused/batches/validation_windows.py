"""Validation batches: the same evenly spaced windows at every call, for any number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from refocused.batches.batch import Batch, BatchReader
from refocused.batches.windows import WindowRange, window_count

if TYPE_CHECKING:
    from refocused.shards.cache import ShardCache


class ValidationWindows:
    """A fixed choice of windows.

    Args:
        ranges: The windows kept for validation.
        windows: How many of them to take, evenly spaced; all when there are fewer.
        skipped: Shards whose windows are left out after that, so that the others stay the same.

    Attributes:
        shards: Shape [windows]: index of each chosen window's shard.
        windows: Shape [windows]: index of each chosen window in its shard.
    """

    shards: NDArray[np.int64]
    windows: NDArray[np.int64]

    def __init__(
        self, ranges: Sequence[WindowRange], *, windows: int, skipped: Collection[int] = ()
    ) -> None:
        total = window_count(ranges)
        taken = min(windows, total)
        places = np.arange(taken, dtype=np.int64) * total // max(1, taken)
        starts = np.cumsum([0, *(one.count for one in ranges)], dtype=np.int64)
        slots = np.searchsorted(starts, places, side="right") - 1
        firsts = np.array([one.first for one in ranges], dtype=np.int64)
        shards = np.array([one.shard for one in ranges], dtype=np.int64)[slots]
        kept = ~np.isin(shards, list(skipped))
        self.shards = shards[kept]
        self.windows = (firsts[slots] + places - starts[slots])[kept]

    def shards_used(self) -> list[int]:
        """Return the shards that must stay local (`ShardCache.pin`), in ascending order."""
        return sorted(set(self.shards.tolist()))


def validation_batches(
    chosen: ValidationWindows,
    cache: ShardCache,
    *,
    micro: int,
    rank: int,
    world_size: int,
    sequence_length: int,
    names: Sequence[str],
    pin: bool = False,
    document_id: int | None = None,
    source: str | None = None,
) -> Iterator[Batch]:
    """Yield one rank's share of the validation windows.

    Every rank yields the same number of batches, because under ZeRO-3 each pass gathers
    parameters from all ranks. Rows that are missing at the end have input 0 and ignored labels; a
    whole batch of them is possible, so losses must be summed and counted, not averaged by batch.

    Raises:
        ShardError: A shard does not become local.
    """
    reader = BatchReader(
        cache, sequence_length=sequence_length, names=names, pin=pin, document_id=document_id
    )
    for start in range(0, len(chosen.windows), micro * world_size):
        rows = slice(start + rank * micro, start + (rank + 1) * micro)
        one_pass = reader.read(chosen.shards[None, rows], chosen.windows[None, rows], micro=micro)
        (batch,) = one_pass.batches()
        yield dataclasses.replace(batch, source=source)
