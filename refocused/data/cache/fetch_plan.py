"""What to fetch next and what to evict: the decisions of a fetcher, without threads or disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence


class FetchQueue:
    """The shards that are wanted, in order, and when each was last wanted.

    Not safe for threads by itself: the fetcher holds its lock around every call.

    Args:
        bytes_of: Local bytes of a shard.
        present: Shards that are local from the start.
    """

    def __init__(self, bytes_of: Callable[[int], int], *, present: Iterable[int] = ()) -> None:
        self._bytes_of = bytes_of
        self.present = set(present)
        self.busy: set[int] = set()
        self._planned: list[int] = []
        self._pinned: list[int] = []
        self._asked: list[int] = []
        self._paused_until: dict[int, float] = {}
        self._last_wanted: dict[int, int] = {}
        self._plans = 0

    def plan(self, needed: Sequence[int]) -> None:
        """Replace the plan: shards in order of use."""
        self._plans += 1
        self._planned = list(needed)
        self._last_wanted.update(dict.fromkeys(needed, self._plans))

    def pin(self, indices: Iterable[int]) -> None:
        """Add shards that are always kept."""
        self._pinned = sorted({*self._pinned, *indices})

    def ask(self, indices: Iterable[int]) -> None:
        """Replace the shards that someone waits for: they come first."""
        self._asked = list(dict.fromkeys(indices))
        self._last_wanted.update(dict.fromkeys(self._asked, self._plans))

    def pause(self, index: int, *, until: float) -> None:
        """Leave a shard alone until a time, after a failure."""
        self._paused_until[index] = until

    def following(self, *, now: float, shared: Collection[int] = ()) -> int | None:
        """Return the shard to work for now: asked, in use, pinned, then the rest of the plan.

        So the whole link is given to what is needed first.

        Args:
            now: Time, of the same clock as the pauses.
            shared: Shards on their way that another thread can help with.
        """
        for index in (*self._asked, *self._planned[:2], *self._pinned, *self._planned[2:]):
            waiting = self._paused_until.get(index, now) > now
            begun = index in self.present or index in self.busy
            if index in shared or not (begun or waiting):
                return index
        return None

    def is_among_first(self, count: int, index: int) -> bool:
        """Whether someone waits for a shard, or it is one of the first so many of the plan."""
        return index in self._asked or index in self._planned[:count]

    def missing(self) -> int:
        """Return how many wanted shards are not local."""
        return len(self._wanted() - self.present)

    def ready(self) -> int:
        """Return how many shards of the plan are local, from the first one on."""
        return sum(1 for _ in itertools.takewhile(self.present.__contains__, self._planned))

    def not_begun(self) -> int:
        """Return how many of them nobody is bringing either."""
        return len(self._wanted() - self.present - self.busy)

    def present_bytes(self) -> int:
        """Return the bytes of the local shards and of those on their way."""
        return sum(self._bytes_of(index) for index in self.present | self.busy)

    def evictable(self, *, bytes_wanted: int) -> list[int]:
        """Return local shards, last wanted longest ago first, that free so many bytes or all."""
        spare = self.present - self._wanted() - self.busy
        chosen = []
        for index in sorted(spare, key=lambda i: (self._last_wanted.get(i, 0), i)):
            if bytes_wanted <= 0:
                break
            chosen.append(index)
            bytes_wanted -= self._bytes_of(index)
        return chosen

    def _wanted(self) -> set[int]:
        return {*self._asked, *self._planned, *self._pinned}
