"""Plan which shards to keep local, which to fetch first, and which to evict."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from refocused.data.order.mixture_order import Stream

if TYPE_CHECKING:
    from refocused.config.data import DataConfig
    from refocused.data.cache.cache import ShardCache


class FetchQueue:
    """The state of each shard, and the order in which missing ones are fetched.

    Shared by the cache and its fetch threads, which hold `changed` around every access.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.present: set[int] = set()  # of the wanted ones, those known to be local
        self.busy: set[int] = set()
        self.planned: list[int] = []
        self.pinned: set[int] = set()
        self.requested: set[int] = set()  # that threads of this process wait for
        self.paused_until: dict[int, float] = {}  # by shard, after a failure
        self.last_wanted: dict[int, int] = {}  # by shard: rises with each plan, and within it
        self._turns = itertools.count(1)

    def plan(self, needed: Sequence[int], pinned: set[int]) -> None:
        """Replace the plan and the pinned shards; others may be evicted by any process."""
        self.planned, self.pinned = list(needed), pinned
        self.last_wanted.update(zip(needed, self._turns, strict=False))
        self.present &= self.wanted

    def request(self, index: int) -> None:
        """Add a shard that is waited for, though it may count as local; it precedes the plan."""
        self.requested.add(index)
        self.last_wanted[index] = next(self._turns)
        self.present.discard(index)

    def following(self, *, now: float, shared: Collection[int] = ()) -> int | None:
        """Return the shard to work on: requested, in use, pinned, then the rest of the plan.

        `now` is on the clock of the pauses. `shared` shards are being fetched, and further threads
        can help.
        """
        first, later = self.planned[:2], self.planned[2:]
        for index in (*sorted(self.requested), *first, *sorted(self.pinned), *later):
            started = index in self.present or index in self.busy
            if index in shared or not (started or self.paused_until.get(index, now) > now):
                return index
        return None

    def ready(self) -> int:
        """Count the plan's shards up to the first that is not local."""
        return sum(1 for _ in itertools.takewhile(self.present.__contains__, self.planned))

    def not_started(self) -> int:
        """Count the wanted shards that are neither local nor being fetched."""
        return len(self.wanted - self.present - self.busy)

    @property
    def wanted(self) -> set[int]:
        """The shards to keep or to fetch."""
        return {*self.planned, *self.pinned, *self.requested}


class ShardPlanner:
    """Plans the cache for one stream, as reading and training move from block to block.

    The ranks of a machine share the cache, and the rank that fetches may read some steps ahead of
    the others. No rank starts step s before all have the batches of step s - 1, so a block is kept
    until training, not reading, has left it. Without room for all blocks between the two, reading
    waits for training. `data` says how far to fetch beyond the blocks in use. `room_bytes` is the
    room for all shards of the stream: `data.disk_limit_gb` less the pinned shards and a download;
    None: no limit. `clock` measures the pace of training, in seconds.
    """

    def __init__(
        self,
        stream: Stream,
        cache: ShardCache,
        *,
        data: DataConfig,
        room_bytes: int | None,
        step_sequences: int,
        clock: Callable[[], float],
    ) -> None:
        self._stream = stream
        self._cache = cache
        self._data = data
        self._room_bytes = room_bytes
        self._ahead = data.fetch_ahead_shards
        self._shards_per_step = step_sequences * stream.shard_count / stream.sequences_per_epoch
        self._clock = clock
        self._first_step: float | None = None  # its end: the first step may wait for its shards
        self._oldest: int | None = None
        self._steps_read = self._steps_taken = self._steps_trained = 0
        self._advanced = threading.Condition()
        self._closed = False
        self._planned_for: tuple[int, int, int] | None = None
        self._planned: list[int] | None = None

    def training_on(self, first_block: int) -> None:
        """Note, in the training thread, the first block of the step to train on next."""
        with self._advanced:
            self._oldest = first_block
            self._steps_taken += 1
            self._advanced.notify_all()
        if self._first_step is None:
            self._first_step = self._clock()

    def trained(self) -> None:
        """Note, in the training thread, that the step is over and the next one is needed."""
        with self._advanced:
            self._steps_trained = self._steps_taken
            self._advanced.notify_all()

    def close(self) -> None:
        """Make a reading thread that waits for training raise."""
        with self._advanced:
            self._closed = True
            self._advanced.notify_all()

    def reading(self, first_block: int, last_block: int) -> None:
        """Plan, in the reading thread, for the step to read next; wait until there is room for it.

        Raises `ShardError` if its blocks alone exceed the limit, and `RuntimeError` when closed.
        """
        if self._oldest is None:
            self._oldest = first_block
        with self._advanced:
            while not self._closed:
                in_use = set(self._stream.shards_between(self._oldest, last_block))
                room = self._room_bytes
                if room is None or sum(map(self._cache.local_bytes, in_use)) <= room:
                    break
                if self._steps_trained == self._steps_read:
                    self._oldest = first_block  # all earlier steps are trained, so all room is free
                    break
                self._advanced.wait()
            if self._closed:
                raise RuntimeError("a ShardPlanner was closed")
            oldest = self._oldest
        self._steps_read += 1
        steps = self._steps_taken - 1
        if self._first_step is not None and steps > 0:
            pace = steps / max(self._clock() - self._first_step, 1e-9)
            shards = math.ceil(pace * self._data.fetch_ahead_seconds * self._shards_per_step)
            self._ahead = max(self._ahead, shards)  # never fewer than before
        planned_for = (oldest, last_block, self._ahead)
        if planned_for != self._planned_for:
            self._planned_for = planned_for
            # The blocks in use, even beyond the room, and shards ahead that fit.
            planned = dict.fromkeys(self._stream.shards_between(oldest, last_block))
            count = min(len(planned) + self._ahead, self._stream.shard_count)
            limit = self._data.fetch_ahead_gb
            left = math.inf if limit is None else int(limit * 1e9)
            if self._room_bytes is not None:
                left = min(left, self._room_bytes - sum(map(self._cache.local_bytes, planned)))
            later = self._stream.shards_after(last_block)
            while len(planned) < count:
                shard = next((shard for shard in later if shard not in planned), None)
                if shard is None:  # no later stage uses the others
                    break
                left -= self._cache.local_bytes(shard)
                if left < 0:
                    break
                planned[shard] = None
            if list(planned) != self._planned:
                self._cache.plan(list(planned))
                self._planned = list(planned)
