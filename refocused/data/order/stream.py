"""What the steps of training take their windows from: one source's order, or a mixture of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from refocused.data.order.position import Position
from refocused.data.order.window_order import Located


class Stream(Protocol):
    """Windows without end, each found by its number, and what must be local for them."""

    @property
    def windows_per_epoch(self) -> int:
        """Windows within which no source is passed over more than about once."""
        ...

    @property
    def skipped(self) -> Collection[int]:
        """Shards whose windows have numbers and are left out."""
        ...

    @property
    def shard_count(self) -> int:
        """Shards with windows to train on."""
        ...

    def number_of(self, position: Position) -> int:
        """Return the number of the first window that is not consumed at a position."""
        ...

    def position_at(self, number: int) -> Position:
        """Return the position at which all windows before a number are consumed."""
        ...

    def locate_in_stream(self, numbers: NDArray[np.int64]) -> Located:
        """Find windows by their numbers (any shape)."""
        ...

    def blocks_in_stream(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the blocks that hold windows; both of any shape."""
        ...

    def shards_between(self, oldest: int, newest: int) -> Iterator[int]:
        """Yield the shards of some blocks, both ends included, in order of use."""
        ...

    def shards_after(self, newest: int) -> Iterator[int]:
        """Yield the shards used after a block, in order of use, until all have come."""
        ...
