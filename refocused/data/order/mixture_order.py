"""The order of a mixture: the source of the k-th sequence, computed without iteration."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from refocused.data.order.sequence_order import Order, derived_key
from refocused.data.order.sequences import Located, Position

PERIOD = (
    1024  # sequences; shares are multiples of 1/1024, exact over any 1,024 consecutive sequences
)

# Purposes of keys derived from the seed; those of an order start with an epoch below 2**32.
SOURCE_SEED, ROTATION = 2**32, 2**32 + 1


def shares_of(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the sequences of each source in a period, by name; at least one if it has a weight.

    The others are allotted by the Sainte-Lague method: each goes to the source with the largest
    quotient of its weight and (2 * sequences + 1).
    """
    exact = {name: Fraction(str(weights[name])) for name in sorted(weights)}
    counts = {name: int(weight > 0) for name, weight in exact.items()}
    for _ in range(PERIOD - sum(counts.values())):
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
    for slot in range(1, period + 1):
        # Deficits in sequences, times the period and 2S - 2, so that they are integers.
        deficits = [
            denominator * (slot * count - period * done)
            for count, done in zip(counts, taken, strict=True)
        ]
        due = [source for source, deficit in enumerate(deficits) if deficit >= period]
        chosen = min(due, key=lambda source: (limit - deficits[source]) / counts[source])
        taken[chosen] += 1
        places[slot - 1] = chosen
    return places


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A part of the stream with shares of its own, up to the next one."""

    begins: int  # sequences of the stream before it
    shares: Mapping[str, int]  # sequences of each source in a period; 0 leaves a source out
    name: str = ""  # of the run's first stage: none


class Mixture:
    """Several orders interleaved into one stream, each with its own epochs.

    Sequence k of a stage comes from the source at place k mod 1,024 of the stage's repeated period,
    independent of ranks, micro-batches and accumulation. Epochs of a source span stages.

    Attributes:
        orders: The order of each source, sorted by name.
        shares: Sequences of each source in a period of the first stage.
        stages: All stages, in order; later ones may be added.
    """

    left_out: Sequence[range] = ()  # numbers of the stream that are skipped

    def __init__(
        self, orders: Mapping[str, Order], *, weights: Mapping[str, float], seed: int
    ) -> None:
        self.shares = shares_of(weights)
        self.stages = [Stage(0, self.shares)]
        self.orders = {name: orders[name] for name in self.shares}
        self.seed = seed

    def stream_from(self, position: Position) -> MixedStream:
        """Return the stream that continues every source from a position, even of other stages."""
        return MixedStream(self, position)


class MixedStream:
    """The sequences of a mixture from a position on, with the methods of `Order`.

    Its blocks are single sequences, because each source changes its blocks at other places.
    Sequences of skipped shards are left out; the following ones of any source take their places. In
    `sequences_per_epoch` sequences, no source is used more than about once.
    """

    def __init__(self, mixture: Mixture, position: Position) -> None:
        orders, self.left_out = mixture.orders, mixture.left_out
        self._names = list(orders)
        self._orders = list(orders.values())
        self._begins = np.array([stage.begins for stage in mixture.stages])
        rotation = int(derived_key(mixture.seed, ROTATION)[0] % np.uint64(PERIOD))
        # [stages, period]: the source of each place.
        self._places = np.empty((len(mixture.stages), PERIOD), dtype=np.int64)
        for number, stage in enumerate(mixture.stages):
            counts = np.array([stage.shares[name] for name in self._names])
            used = np.flatnonzero(counts)
            self._places[number] = np.roll(used[interleaved(counts[used].tolist())], rotation)
        # [stages, period + 1, sources]: sequences of each source before a place of the period.
        is_source = self._places[..., None] == np.arange(len(orders))
        self._before = np.pad(np.cumsum(is_source, 1), ((0, 0), (1, 0), (0, 0)))
        self._counts = self._before[:, -1]
        # [stages, sources]: sequences of each source before each stage.
        self._earlier = np.zeros_like(self._counts)
        for number, begin in enumerate(self._begins[1:].tolist()):
            self._earlier[number + 1 :] = self._consumed(begin, number)
        if position.sources is not None:
            consumed = [position.sources.get(name, 0) for name in self._names]
            self._earlier += np.array(consumed) - self._consumed(position.sequences)
        self.sequences_per_epoch = min(
            order.sequences_per_epoch * PERIOD // count
            for order, count in zip(self._orders, self._counts.max(0).tolist(), strict=True)
            if count
        )
        self.shard_count = sum(order.shard_count for order in self._orders)
        self.skipped = frozenset(itertools.chain.from_iterable(o.skipped for o in self._orders))

    def number_of(self, position: Position) -> int:
        """Return the number of the first sequence that is not consumed at a position."""
        return position.sequences

    def position_at(self, number: int) -> Position:
        """Return the position at which all sequences before a number are consumed."""
        consumed = self._consumed(number).tolist()
        epochs = [
            sequences // order.sequences_per_epoch
            for sequences, order in zip(consumed, self._orders, strict=True)
        ]
        return Position(min(epochs), number, dict(zip(self._names, consumed, strict=True)))

    def locate(self, numbers: NDArray[np.int64]) -> Located:
        """Find sequences by their numbers (any shape)."""
        stages = np.searchsorted(self._begins, numbers, side="right") - 1
        periods, places = np.divmod(numbers - self._begins[stages], PERIOD)
        sources = self._places[stages, places]
        of_source = self._earlier[stages, sources] + periods * self._counts[stages, sources]
        of_source += self._before[stages, places, sources]
        located = Located(np.empty_like(of_source), np.empty_like(of_source))
        for source, order in enumerate(self._orders):
            here = sources == source
            if here.any():
                part = order.locate(of_source[here])
                located.shards[here] = part.shards
                located.sequences[here] = part.sequences
        return located

    def blocks_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers themselves."""
        return numbers

    def shards_between(self, oldest: int, newest: int) -> Iterator[int]:
        """Yield, by source, the shards of some sequences, and each used source's next one."""
        unused = self._counts[self._stage_of(newest)] == 0
        spans = np.stack([self._consumed(oldest), self._consumed(newest) - unused])
        for order, span in zip(self._orders, spans.T, strict=True):
            if span[0] <= span[1]:
                first, last = order.blocks_of(span).tolist()
                yield from order.shards_between(first, last)

    def shards_after(self, newest: int) -> Iterator[int]:
        """Yield the shards of the following blocks of all sources, in order of their start."""
        upcoming = (self._upcoming(source, newest) for source in range(len(self._orders)))
        for _, _, shards in heapq.merge(*upcoming):
            yield from shards

    def number_of_sequence(self, source: int, sequence: int) -> int | None:
        """Return the number of a source's sequence `own`; None if no stage reaches it."""
        stage = int(np.searchsorted(self._earlier[:, source], sequence, side="right")) - 1
        places = np.flatnonzero(self._places[stage] == source)
        if not places.size:
            return None
        periods, slot = divmod(sequence - int(self._earlier[stage, source]), len(places))
        return int(self._begins[stage]) + periods * PERIOD + int(places[slot])

    def _upcoming(self, source: int, newest: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield one source's next blocks: the number of the first sequence, the source, shards."""
        order, consumed = self._orders[source], int(self._consumed(newest)[source])
        in_use = bool(self._counts[self._stage_of(newest), source])
        block = int(order.blocks_of(np.array([consumed]))[0]) + in_use
        # The rest of this epoch and the next one contain all its shards.
        blocks = itertools.islice(order.blocks_from(block), 2 * order.blocks_per_epoch)
        for following, shards in enumerate(blocks, start=block):
            number = self.number_of_sequence(source, max(consumed, order.block_start(following)))
            if number is None:
                return
            yield number, source, shards

    def _stage_of(self, number: int) -> int:
        return int(np.searchsorted(self._begins, number, side="right")) - 1

    def _consumed(self, number: int, stage: int | None = None) -> NDArray[np.int64]:
        """Return how many sequences of each source precede a number of the stream, shape [S]."""
        stage = self._stage_of(number) if stage is None else stage
        periods, slot = divmod(number - int(self._begins[stage]), PERIOD)
        consumed: NDArray[np.int64] = self._earlier[stage] + periods * self._counts[stage]
        consumed += self._before[stage, slot]
        return consumed


Stream = Order | MixedStream  # endless sequences, and the shards that they need
