"""Which windows a rank reads in each optimizer step, and which shards that needs."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from refocused.config.batch_plan import BatchPlan
from refocused.data.order.position import Position
from refocused.data.order.window_order import Stream

if TYPE_CHECKING:
    from refocused.data.cache.cache import ShardCache

# Of one rank, located together: numpy's cost per call is shared, and 2 ms pass until the first.
WINDOWS_AT_ONCE = 4096


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepWindows:
    """One optimizer step as one rank sees it.

    Attributes:
        shards: Shape [accumulation, micro]: index of the shard of each of the rank's windows.
        windows: Same shape: index of each window in its shard.
        first_block: Block of the stream that holds the first window of the step, of any rank.
        last_block: Block that holds the last one.
        after: Position when the step is done.
    """

    shards: NDArray[np.int64]
    windows: NDArray[np.int64]
    first_block: int
    last_block: int
    after: Position


def steps_from(
    order: Stream, position: Position, *, plan: BatchPlan, rank: int
) -> Iterator[StepWindows]:
    """Yield one rank's share of the steps from a position on, without end.

    Step s takes the next `plan.windows` windows of the stream that are of no skipped shard. They
    are dealt out in the order accumulation, rank, row, so which windows a step holds depends on
    their number alone, not on how many ranks or passes share them.
    """
    share = np.arange(plan.windows).reshape(plan.accumulation, plan.world_size, plan.micro)[:, rank]
    # About one epoch at most: tiny data would have to lay out hundreds of them for the first step.
    most = min(WINDOWS_AT_ONCE // share.size, order.windows_per_epoch // plan.windows)
    start = order.number_of(position)
    for numbers in _numbers_from(order, start, steps=max(1, most), windows=plan.windows):
        located = order.locate_in_stream(numbers[:, share])
        blocks = order.blocks_in_stream(numbers[:, [0, -1]]).tolist()
        for number, (first_block, last_block) in enumerate(blocks):
            yield StepWindows(
                shards=located.shards[number],
                windows=located.windows[number],
                first_block=first_block,
                last_block=last_block,
                after=order.position_at(int(numbers[number, -1]) + 1),
            )


def _numbers_from(
    order: Stream, start: int, *, steps: int, windows: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the numbers of the windows of so many steps, shape [steps, windows], without end."""
    skipped, kept = np.array(sorted(order.skipped), dtype=np.int64), np.empty(0, dtype=np.int64)
    while True:
        numbers = start + np.arange(steps * windows)
        start += steps * windows
        if skipped.size:
            numbers = numbers[~np.isin(order.locate_in_stream(numbers).shards, skipped)]
        kept = np.concatenate([kept, numbers])
        if len(kept) >= steps * windows:
            yield kept[: steps * windows].reshape(steps, windows)
            kept = kept[steps * windows :]


def shards_wanted(
    order: Stream,
    *,
    oldest: int,
    newest: int,
    ahead: int,
    bytes_of: Callable[[int], int],
    room_bytes: int | None,
    ahead_bytes: int | None = None,
) -> list[int]:
    """Return the shards to keep local, in order of use.

    Args:
        order: What is trained on.
        oldest: Block that may still be read by the slowest rank.
        newest: Block that is being read ahead.
        ahead: Shards wanted beyond the newest block: fewer when there are no others, or no room.
        bytes_of: Local bytes of a shard.
        room_bytes: Most that all may take; the blocks themselves are wanted even beyond it, so
            that the cache can refuse with the numbers. None: no limit.
        ahead_bytes: Most that those beyond the newest block may take; None: no limit.
    """
    wanted = dict.fromkeys(order.shards_between(oldest, newest))
    most = min(len(wanted) + ahead, order.shard_count)
    taken = in_use = sum(map(bytes_of, wanted))
    later = order.shards_after(newest)
    while len(wanted) < most:
        shard = next(shard for shard in later if shard not in wanted)
        taken += bytes_of(shard)
        if room_bytes is not None and taken > room_bytes:
            break
        if ahead_bytes is not None and taken - in_use > ahead_bytes:
            break
        wanted[shard] = None
    return list(wanted)


class Pace:
    """How fast training uses shards, measured from the steps that were handed out.

    Args:
        shards_per_step: Shards' worth of windows in one step.
        clock: Seconds from any origin.
    """

    def __init__(self, *, shards_per_step: float, clock: Callable[[], float]) -> None:
        self._shards_per_step = shards_per_step
        self._clock = clock
        self._began: float | None = None
        self._steps = 0

    def step(self) -> None:
        """Count a step; the first, which may have waited for its shards, starts the clock."""
        if self._began is None:
            self._began = self._clock()
        else:
            self._steps += 1

    def shards_in(self, seconds: float) -> int:
        """Return the shards that so many seconds of training use; 0 while the pace is unknown."""
        if self._began is None or not self._steps:
            return 0
        passed = max(self._clock() - self._began, 1e-9)
        return math.ceil(self._steps / passed * seconds * self._shards_per_step)


class ShardPlanner:
    """Tells the cache what to keep, whenever reading or training has moved on to another block.

    The ranks of a node share the fetched files, and the rank that fetches may read a few steps
    ahead of the others. What the others may still need follows from the step being trained on:
    no rank starts step s before all have the batches of step s - 1. So a block is kept until
    training, not reading, has left it. Where several small blocks follow one another, reading
    could be more blocks ahead than there is room for: then it waits for training.

    Args:
        order: What is trained on.
        cache: The local shards; only the reading thread's calls reach it.
        ahead: Shards wanted beyond the block that is being read.
        room_bytes: Most that the wanted shards may take; None: no limit.
        ahead_seconds: Time of training whose shards are wanted beyond that block, when it takes
            more than `ahead`; None: it is not looked at.
        ahead_bytes: Most that the shards beyond that block may take; None: no limit.
        pace: Turns seconds into shards; needed for `ahead_seconds`.
    """

    def __init__(
        self,
        order: Stream,
        cache: ShardCache,
        *,
        ahead: int,
        room_bytes: int | None,
        ahead_seconds: float | None = None,
        ahead_bytes: int | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._order = order
        self._cache = cache
        self._ahead = ahead
        self._room_bytes = room_bytes
        self._ahead_seconds = ahead_seconds
        self._ahead_bytes = ahead_bytes
        self._pace = pace
        self._oldest: int | None = None
        self._steps_read = self._steps_taken = self._steps_trained = 0
        self._moved_on = threading.Condition()
        self._closed = False
        self._fits: tuple[int, int] | None = None
        self._planned_for: tuple[int, int, int] | None = None
        self._planned: list[int] | None = None

    def training_on(self, step: StepWindows) -> None:
        """Say, from the training thread, that a step is next to be trained on."""
        with self._moved_on:
            self._oldest = step.first_block
            self._steps_taken += 1
            self._moved_on.notify_all()
        if self._pace is not None:
            self._pace.step()

    def trained(self) -> None:
        """Say, from the training thread, that the step is over and it wants another."""
        with self._moved_on:
            self._steps_trained = self._steps_taken
            self._moved_on.notify_all()

    def close(self) -> None:
        """Let a reading thread that waits for training end."""
        with self._moved_on:
            self._closed = True
            self._moved_on.notify_all()

    def has_room(self, step: StepWindows) -> bool:
        """Whether a step can be read, as far as the room goes, before training moves on."""
        oldest = step.first_block if self._oldest is None else self._oldest
        if self._room_bytes is None or (oldest, step.last_block) == self._fits:
            return True
        in_use = set(self._order.shards_between(oldest, step.last_block))
        if sum(map(self._cache.local_bytes, in_use)) > self._room_bytes:
            return False
        self._fits = oldest, step.last_block
        return True

    def reading(self, step: StepWindows) -> None:
        """Say, from the reading thread, that a step is about to be read.

        It waits while there is no room for the step; all steps before it must be within reach of
        training, or nothing would ever move on.

        Raises:
            ShardError: The blocks of this step alone are more than `data.disk_limit_gb` allows.
        """
        if self._oldest is None:
            self._oldest = step.first_block
        if not self.has_room(step):
            self._await_training(step)
        self._steps_read += 1
        oldest = self._oldest  # the training thread may move it on at any time
        ahead = self._shards_ahead()
        if (oldest, step.last_block, ahead) == self._planned_for:
            return
        self._planned_for = (oldest, step.last_block, ahead)
        wanted = shards_wanted(
            self._order,
            oldest=oldest,
            newest=step.last_block,
            ahead=ahead,
            bytes_of=self._cache.local_bytes,
            room_bytes=self._room_bytes,
            ahead_bytes=self._ahead_bytes,
        )
        if wanted != self._planned:
            self._cache.plan(wanted)
            self._planned = wanted

    def _await_training(self, step: StepWindows) -> None:
        """Wait for room; when training is through with all steps before, the blocks are its own."""

        def is_trained() -> bool:
            return self._steps_trained == self._steps_read

        with self._moved_on:
            self._moved_on.wait_for(lambda: self._closed or is_trained() or self.has_room(step))
            if self._closed:
                raise RuntimeError("a ShardPlanner that waited for training was closed")
            if is_trained():
                self._oldest = step.first_block

    def _shards_ahead(self) -> int:
        """Never fewer than before: what was fetched for a faster pace is not given up again."""
        if self._ahead_seconds is not None and self._pace is not None:
            self._ahead = max(self._ahead, self._pace.shards_in(self._ahead_seconds))
        return self._ahead
