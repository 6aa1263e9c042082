"""The order of training: the sequence of each number of the stream, by keyed permutations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from refocused.data.order.sequences import Located, Position, SequenceRange
from refocused.system.errors import ShardError

# SplitMix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014,
# with the constants of Vigna's public-domain splitmix64.c. Not numpy's generators: the order of
# the data must not change with numpy's version.
GAMMA = np.uint64(0x9E3779B97F4A7C15)
FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
SECOND_FACTOR = np.uint64(0x94D049BB133111EB)

# For wide halves, 4 rounds are enough (Luby and Rackoff, 1988). Halves of one or two bits need
# more: over 24,000 keys, the first of 5 elements came last 10 % too often after 6 rounds, but not
# after 12. Must be even, because halves of unequal width swap in every round.
ROUNDS = 12

POWERS_OF_TWO = np.int64(1) << np.arange(63, dtype=np.int64)


def hashed(key: NDArray[np.uint64], values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 pseudorandom bits for each value: SplitMix64's output of that number for a key.

    `key` has shape [1] or that of `values`; a scalar would warn on overflow.
    """
    mixed = values * GAMMA
    mixed += key
    mixed ^= mixed >> np.uint64(30)
    mixed *= FIRST_FACTOR
    mixed ^= mixed >> np.uint64(27)
    mixed *= SECOND_FACTOR
    mixed ^= mixed >> np.uint64(31)
    return mixed


def derived_key(seed: int, *path: int) -> NDArray[np.uint64]:
    """Return a key of shape [1] for a seed and a path of numbers, all modulo 2**64."""
    key = np.array([seed % 2**64], dtype=np.uint64)
    for number in path:
        key = hashed(key, np.array([(number + 1) % 2**64], dtype=np.uint64))
    return key


def shuffled(count: int, *, key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return 0 to `count` - 1 sorted by hash, shape [count]."""
    hashes = hashed(key, np.arange(count, dtype=np.uint64))
    return np.argsort(hashes, kind="stable").astype(np.int64)


def permuted(
    values: NDArray[np.int64], *, sizes: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Map each value in [0, size) to its place in a keyed permutation of [0, size).

    A Feistel network permutes the smallest power of two that holds the size; results outside the
    range are permuted again (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", CT-RSA 2002), fewer than twice on average. All arguments have shape [n].
    """
    bits = np.searchsorted(POWERS_OF_TWO, sizes).astype(np.uint64)
    places = _feistel(values.astype(np.uint64), bits=bits, keys=keys).astype(np.int64)
    outside = np.flatnonzero(places >= sizes)
    while outside.size:
        again = _feistel(
            places[outside].astype(np.uint64), bits=bits[outside], keys=keys[outside]
        ).astype(np.int64)
        places[outside] = again
        outside = outside[again >= sizes[outside]]
    return places


def _feistel(
    values: NDArray[np.uint64], *, bits: NDArray[np.uint64], keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Permute [0, 2**bits) by a Feistel network for each key."""
    unit = np.uint64(1)
    high_bits = bits >> unit
    low_bits = bits - high_bits
    high_mask = (unit << high_bits) - unit
    low_mask = (unit << low_bits) - unit
    high, low = values >> low_bits, values & low_mask
    for number in range(ROUNDS):
        mixed = hashed(keys + np.uint64(number), low)
        mixed &= high_mask
        mixed ^= high
        high, low = low, mixed
        high_mask, low_mask = low_mask, high_mask
    return (high << low_bits) | low


MAX_AUTOMATIC_BLOCK = 16  # shards; more only delays the first step of a streamed run

# Purposes of keys derived from (seed, epoch).
RANGE_ORDER, WINDOW_ORDER = 0, 1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """One epoch: its ranges in order of use, and the starts of ranges and blocks."""

    ranges: NDArray[np.int64]  # [ranges]: indices, in order of use
    range_starts: NDArray[np.int64]  # [ranges + 1]: sequences before each range, and all
    block_starts: NDArray[np.int64]  # [blocks + 1]: sequences before each block, and all
    sequence_key: NDArray[np.uint64]  # [1]: the keys of the blocks are derived from it


class Order:
    """Every sequence once per epoch, shuffled so that few shards are needed at a time.

    Each epoch shuffles the ranges and divides them into blocks of `block_shards`; within a block
    the sequences of all its ranges are shuffled together. The order depends only on the arguments
    and the epoch, by integer arithmetic: not on ranks, threads or numpy's version.

    The stream is epoch after epoch: sequence `k` of epoch `e` has the number `e *
    sequences_per_epoch + k`. Blocks are numbered across epochs too. Sequences of `skipped` shards
    keep their numbers, though they are not used, so that the order and all positions stay the same.
    """

    left_out: Sequence[range] = ()  # numbers that are skipped as well

    def __init__(
        self,
        ranges: Sequence[SequenceRange],
        *,
        seed: int,
        block_shards: int,
        skipped: Iterable[int] = (),
    ) -> None:
        self._shards = np.array([span.shard for span in ranges], dtype=np.int64)
        self._firsts = np.array([span.first for span in ranges], dtype=np.int64)
        self._counts = np.array([span.count for span in ranges], dtype=np.int64)
        self._seed = seed
        self.block_shards = block_shards
        self.sequences_per_epoch = int(self._counts.sum())
        self.blocks_per_epoch = -(-len(ranges) // block_shards)
        self.skipped = frozenset(skipped)
        self.shard_count = len({span.shard for span in ranges} - self.skipped)
        self._layout = functools.lru_cache(maxsize=2)(self._lay_out)

    @property
    def smallest_block(self) -> int:
        """Least sequences of any block of any epoch."""
        rest = len(self._counts) % self.block_shards or self.block_shards
        return int(np.sort(self._counts)[:rest].sum())

    def stream_from(self, position: Position) -> Order:
        """Return itself: the stream of a single source does not depend on the position."""
        return self

    def number_of(self, position: Position) -> int:
        """Return the number of the first sequence that is not consumed at a position."""
        return position.epoch * self.sequences_per_epoch + position.sequences

    def position_at(self, number: int) -> Position:
        """Return the position at which all sequences before a number are consumed."""
        return Position(*divmod(number, self.sequences_per_epoch))

    def locate(self, numbers: NDArray[np.int64]) -> Located:
        """Find sequences by their numbers (any shape)."""
        located = Located(np.empty_like(numbers), np.empty_like(numbers))
        for epoch, here, ks in self._epochs_of(numbers):
            layout = self._layout(epoch)
            blocks = np.searchsorted(layout.block_starts, ks, side="right") - 1
            begins = layout.block_starts[blocks]
            places = begins + permuted(
                ks - begins,
                sizes=layout.block_starts[blocks + 1] - begins,
                keys=hashed(layout.sequence_key, blocks.astype(np.uint64)),
            )
            slots = np.searchsorted(layout.range_starts, places, side="right") - 1
            ranges = layout.ranges[slots]
            located.shards[here] = self._shards[ranges]
            located.sequences[here] = self._firsts[ranges] + places - layout.range_starts[slots]
        return located

    def blocks_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the blocks that hold sequences; both of any shape."""
        blocks = np.empty_like(numbers)
        for epoch, here, ks in self._epochs_of(numbers):
            starts = self._layout(epoch).block_starts
            blocks[here] = epoch * self.blocks_per_epoch - 1
            blocks[here] += np.searchsorted(starts, ks, side="right")
        return blocks

    def block_start(self, block: int) -> int:
        """Return the number of the first sequence of a block."""
        epoch, number = divmod(block, self.blocks_per_epoch)
        return epoch * self.sequences_per_epoch + int(self._layout(epoch).block_starts[number])

    def blocks_from(self, block: int) -> Iterator[tuple[int, ...]]:
        """Yield the used shards of that block and of all following ones, without end."""
        epoch, first = divmod(block, self.blocks_per_epoch)
        while True:
            shards = self._shards[self._layout(epoch).ranges]
            for number in range(first, self.blocks_per_epoch):
                begin = number * self.block_shards
                here = shards[begin : begin + self.block_shards].tolist()
                yield tuple(shard for shard in here if shard not in self.skipped)
            epoch, first = epoch + 1, 0

    def shards_between(self, oldest: int, newest: int) -> Iterator[int]:
        """Yield the shards of some blocks, both ends included, in order of use."""
        blocks = itertools.islice(self.blocks_from(oldest), newest - oldest + 1)
        return itertools.chain.from_iterable(blocks)

    def shards_after(self, newest: int) -> Iterator[int]:
        """Yield the shards used after a block, in order of use, without end."""
        return itertools.chain.from_iterable(self.blocks_from(newest + 1))

    def _epochs_of(
        self, numbers: NDArray[np.int64]
    ) -> Iterator[tuple[int, NDArray[np.bool], NDArray[np.int64]]]:
        """Yield each epoch of the numbers, a mask of its numbers, and their sequences in it."""
        epochs, ks = np.divmod(numbers, self.sequences_per_epoch)
        for epoch in range(int(epochs.min()), int(epochs.max()) + 1) if numbers.size else ():
            here = epochs == epoch
            yield epoch, here, ks[here]

    def _lay_out(self, epoch: int) -> _Layout:
        ranges = shuffled(len(self._shards), key=derived_key(self._seed, epoch, RANGE_ORDER))
        range_starts = np.concatenate(([0], np.cumsum(self._counts[ranges])))
        return _Layout(
            ranges=ranges,
            range_starts=range_starts,
            block_starts=np.append(range_starts[: -1 : self.block_shards], range_starts[-1]),
            sequence_key=derived_key(self._seed, epoch, WINDOW_ORDER),
        )


def choose_block_shards(
    setting: int,
    *,
    sources: Sequence[Sequence[SequenceRange]],
    shard_bytes: Sequence[int],
    room_bytes: int | None,
) -> int:
    """Return how many shards are shuffled together.

    Two blocks of each source must be local, since the next one is read before training leaves the
    present one.

    Args:
        setting: `data.block_shards`; 0 chooses 16, or as many of the largest shards as fit into
            half the room, at least 1.
        sources: The training sequences of each source.
        shard_bytes: Local size of every shard of the manifest.
        room_bytes: Maximum on disk for the training shards; None: no limit. Must not depend on
            the disk's free space, which would change the order of a resumed run.

    Raises:
        ShardError: Two blocks of the largest shards do not fit into the room.
    """
    largest_first = [
        sorted((shard_bytes[span.shard] for span in ranges), reverse=True) for ranges in sources
    ]

    def largest(count: int) -> int:
        return sum(sum(sizes[:count]) for sizes in largest_first)

    chosen = setting or MAX_AUTOMATIC_BLOCK
    if room_bytes is not None and not setting:
        fitting = [count for count in range(1, chosen + 1) if largest(count) <= room_bytes // 2]
        chosen = max(1, len(fitting))
    chosen = min(chosen, max(map(len, sources)))
    needed = largest(2 * chosen)
    if room_bytes is not None and needed > room_bytes:
        raise ShardError(
            f"two blocks of {chosen} shards{' of each source' if len(sources) > 1 else ''} take "
            f"up to {needed:,} bytes on disk, but data.disk_limit_gb leaves {room_bytes:,} besides "
            "the validation shards and a download. Raise "
            f"data.disk_limit_gb by at least {math.ceil((needed - room_bytes) / 1e6) / 1e3}"
            f"{', or lower data.block_shards' if chosen > 1 else ''}."
        )
    return chosen
