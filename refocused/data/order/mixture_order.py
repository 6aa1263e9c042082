"""The order of a mixture: the source of the k-th window, computed without iteration."""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from refocused.data.order.permutation import derived_key
from refocused.data.order.position import Position
from refocused.data.order.window_order import Located, Order

PERIOD = 1024  # windows; shares are multiples of 1/1024, exact over any 1,024 consecutive windows

# Purposes of keys derived from the seed; those of an order start with an epoch below 2**32.
SOURCE_SEED, ROTATION = 2**32, 2**32 + 1


def shares_of(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the windows of each source in a period, by name; each has at least one.

    The others are allotted by the Sainte-Lague method: each goes to the source with the largest
    quotient of its weight and (2 * windows + 1).
    """
    exact = {name: Fraction(str(weights[name])) for name in sorted(weights)}
    counts = dict.fromkeys(exact, 1)
    for _ in range(PERIOD - len(counts)):
        following = max(exact, key=lambda name: exact[name] / (2 * counts[name] + 1))
        counts[following] += 1
    return counts


def source_seed(seed: int, name: str) -> int:
    """Return the seed of one source's order, so that equal sources are shuffled differently."""
    return int(derived_key(seed, SOURCE_SEED, zlib.crc32(name.encode()))[0])


def interleaved(counts: Sequence[int]) -> NDArray[np.int64]:
    """Spread S sources, with `counts` places each, over one period as evenly as possible.

    Returns the source of each place, shape [sum(counts)]. Tijdeman, "The chairman assignment
    problem", Discrete Mathematics 32 (1980): of the sources whose deficit is at least
    1 / (2S - 2), the next is the one whose deficit would first exceed 1 - 1 / (2S - 2). After any
    number of places no source deviates from its share by more than that.
    """
    period, denominator = sum(counts), max(1, 2 * len(counts) - 2)
    limit = period * (denominator - 1)
    taken = [0] * len(counts)
    places = np.empty(period, dtype=np.int64)
    for place in range(1, period + 1):
        # Deficits in windows, times the period and 2S - 2, so that they are integers.
        deficits = [
            denominator * (place * count - period * done)
            for count, done in zip(counts, taken, strict=True)
        ]
        due = [source for source, deficit in enumerate(deficits) if deficit >= period]
        chosen = min(due, key=lambda source: (limit - deficits[source]) / counts[source])
        taken[chosen] += 1
        places[place - 1] = chosen
    return places


class Mixture:
    """Several orders interleaved into one stream, each with its own epochs.

    Window k of the stream comes from the source at place k mod 1,024 of a repeated period,
    independent of ranks, micro-batches and accumulation.

    Attributes:
        orders: The order of each source, sorted by name.
        shares: Windows of each source in a period.
    """

    def __init__(
        self, orders: Mapping[str, Order], *, weights: Mapping[str, float], seed: int
    ) -> None:
        self.shares = shares_of(weights)
        self.orders = {name: orders[name] for name in self.shares}
        self._seed = seed

    def stream_from(self, position: Position) -> MixedStream:
        """Return the stream that continues every source from a position.

        The shares may differ from those of the stream that reached the position.
        """
        rotation = int(derived_key(self._seed, ROTATION)[0] % np.uint64(PERIOD))
        places = np.roll(interleaved(list(self.shares.values())), rotation)
        return MixedStream(self.orders, places=places, position=position)


class MixedStream:
    """The windows of a mixture from a position on, with the methods of `Order`.

    Its blocks are single windows, because each source changes its blocks at other places. Windows
    of skipped shards are left out; the following ones of any source take their places. In
    `windows_per_epoch` windows, no source is used more than about once.
    """

    def __init__(
        self, orders: Mapping[str, Order], *, places: NDArray[np.int64], position: Position
    ) -> None:
        self._names = list(orders)
        self._orders = list(orders.values())
        self._places = places
        # Shape [period + 1, sources]: windows of each source before a place of the period.
        is_source = places[:, None] == np.arange(len(orders))
        none = np.zeros((1, len(orders)), np.int64)
        self._before = np.concatenate([none, np.cumsum(is_source, 0)])
        self._counts = self._before[-1]
        self._ahead = np.zeros_like(self._counts)
        if position.sources is not None:
            consumed = [position.sources[name] for name in self._names]
            self._ahead = np.array(consumed) - self._consumed(position.windows)
        self.windows_per_epoch = min(
            order.windows_per_epoch * PERIOD // count
            for order, count in zip(self._orders, self._counts.tolist(), strict=True)
        )
        self.shard_count = sum(order.shard_count for order in self._orders)
        self.skipped = frozenset(itertools.chain.from_iterable(o.skipped for o in self._orders))

    def number_of(self, position: Position) -> int:
        """Return the number of the first window that is not consumed at a position."""
        return position.windows

    def position_at(self, number: int) -> Position:
        """Return the position at which all windows before a number are consumed."""
        consumed = self._consumed(number).tolist()
        epochs = [
            windows // order.windows_per_epoch
            for windows, order in zip(consumed, self._orders, strict=True)
        ]
        return Position(min(epochs), number, dict(zip(self._names, consumed, strict=True)))

    def locate(self, numbers: NDArray[np.int64]) -> Located:
        """Find windows by their numbers (any shape)."""
        periods, places = np.divmod(numbers, PERIOD)
        sources = self._places[places]
        own = self._ahead[sources] + periods * self._counts[sources] + self._before[places, sources]
        located = Located(np.empty_like(own), np.empty_like(own))
        for source, order in enumerate(self._orders):
            here = sources == source
            if here.any():
                part = order.locate(own[here])
                located.shards[here] = part.shards
                located.windows[here] = part.windows
        return located

    def blocks_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers themselves."""
        return numbers

    def shards_between(self, oldest: int, newest: int) -> Iterator[int]:
        """Yield, source by source, the shards of some windows and of each source's next one."""
        spans = np.stack([self._consumed(oldest), self._consumed(newest)], axis=1)
        for order, span in zip(self._orders, spans, strict=True):
            first, last = order.blocks_of(span).tolist()
            yield from order.shards_between(first, last)

    def shards_after(self, newest: int) -> Iterator[int]:
        """Yield the shards of the following blocks of all sources, in order of their start."""
        consumed = self._consumed(newest).tolist()
        for _, _, shards in heapq.merge(*map(self._upcoming, range(len(consumed)), consumed)):
            yield from shards

    def _upcoming(self, source: int, consumed: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield one source's next blocks: the number of the first window, the source, shards."""
        order = self._orders[source]
        block = int(order.blocks_of(np.array([consumed]))[0]) + 1
        # The rest of this epoch and the next one contain all its shards.
        blocks = itertools.islice(order.blocks_from(block), 2 * order.blocks_per_epoch)
        places = np.flatnonzero(self._places == source)
        for number, shards in enumerate(blocks, start=block):
            own = order.block_start(number) - int(self._ahead[source])
            period, place = divmod(own, len(places))
            yield period * PERIOD + int(places[place]), source, shards

    def _consumed(self, number: int) -> NDArray[np.int64]:
        """Return how many windows of each source precede a number of the stream, shape [S]."""
        periods, place = divmod(number, PERIOD)
        consumed: NDArray[np.int64] = self._ahead + periods * self._counts + self._before[place]
        return consumed


Stream = Order | MixedStream  # endless windows, and the shards that they need
