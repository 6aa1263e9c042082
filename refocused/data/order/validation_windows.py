"""Validation windows: the same evenly spaced windows at every call, for any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from refocused.data.order.windows import WindowRange, window_count


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
