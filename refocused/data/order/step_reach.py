"""How many bytes of shards one step can need at once: it reaches far over short ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from refocused.data.order.window_order import Order

MOST_EPOCHS = 1000  # to look at: more than any run that streams makes, in a second at most


def most_bytes_of_a_step(
    order: Order, *, step_windows: int, windows: int, shard_bytes: Sequence[int]
) -> int:
    """Return the most bytes that a step over three blocks or more needs; 0 where none is.

    Steps are looked at wherever they may begin, since a resume with another batch shifts them: of
    those that begin in a block the one that begins with its last window reaches farthest.

    Args:
        order: Of one source.
        step_windows: Its windows in a step.
        windows: Those of the whole run.
        shard_bytes: Local size of every shard of the manifest.
    """
    if step_windows - 2 < order.smallest_block:
        return 0
    epochs = min(MOST_EPOCHS, math.ceil(windows / order.windows_per_epoch))
    return max(
        _most_in_epoch(order, epoch, step_windows=step_windows, shard_bytes=shard_bytes)
        for epoch in range(epochs)
    )


def _most_in_epoch(
    order: Order, epoch: int, *, step_windows: int, shard_bytes: Sequence[int]
) -> int:
    firsts = epoch * order.blocks_per_epoch + np.arange(order.blocks_per_epoch)
    begins = np.array([order.block_start(first + 1) - 1 for first in firsts.tolist()])
    lasts = order.blocks_in_stream(begins + step_windows - 1)
    reaching = np.flatnonzero(lasts - firsts > 1)
    spans = zip(firsts[reaching].tolist(), lasts[reaching].tolist(), strict=True)
    return max((_bytes(order, first, last, shard_bytes) for first, last in spans), default=0)


def _bytes(order: Order, first: int, last: int, shard_bytes: Sequence[int]) -> int:
    """Return the bytes of the shards of some blocks; a shard that comes again counts once."""
    last = min(last, first + 2 * order.blocks_per_epoch)  # all shards have come by then
    return sum(shard_bytes[shard] for shard in set(order.shards_between(first, last)))
