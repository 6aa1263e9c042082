"""The sequences of a data set, split into training and validation; positions in the stream."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from refocused.data.formats.object_names import matches
from refocused.system.errors import CheckpointError, ShardError, counted

if TYPE_CHECKING:
    from refocused.data.manifest.shard_manifest import Manifest, Shard


NAMES_SHOWN = 5  # enough to see how the files are named


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceRange:
    """Consecutive sequences of one shard.

    Sequence `i` covers tokens `[i * T, i * T + T + 1)` for sequence length `T`. Neighbors share one
    token, so every token but the shard's first is a label once.
    """

    shard: int
    first: int
    count: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Located:
    """Sequences by their places, in two arrays of one shape."""

    shards: NDArray[np.int64]  # index in the manifest
    sequences: NDArray[np.int64]  # index in the shard


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """Training and validation sequences, each in name order of the shards."""

    train: tuple[SequenceRange, ...]
    validation: tuple[SequenceRange, ...]


def sequence_count(ranges: Iterable[SequenceRange]) -> int:
    """Return the sequences of all ranges."""
    return sum(span.count for span in ranges)


def sequences_of(tokens: int, *, sequence_length: int) -> int:
    """Return how many sequences fit into a shard; up to `sequence_length` tokens stay unused."""
    return max(0, (tokens - 1) // sequence_length)


def split_sequences(
    manifest: Manifest,
    *,
    sequence_length: int,
    validation_files: Sequence[str] = (),
    validation_fraction: float = 0.0,
    first_shard: int = 0,
) -> Split:
    """Split all sequences into training and validation sequences.

    Shards that match `validation_files` (glob patterns) are held out as a whole. Without patterns,
    `validation_fraction` of the sequences, rounded up, is held out from the end in name order; it
    may start within a shard. Shards are numbered from `first_shard` on. Raises `ShardError` if a
    pattern matches no shard, or no sequence is left for training or validation.
    """
    shards = manifest.shards

    def named_by(patterns: Sequence[str]) -> set[int]:
        indexed = enumerate(shards)
        return {i for i, shard in indexed if any(matches(f.name, patterns) for f in shard.files)}

    for pattern in validation_files:
        if not named_by([pattern]):
            some = ", ".join(shard.name for shard in shards[:NAMES_SHOWN])
            raise ShardError(
                f"data.validation_files: {pattern!r} matches none of the {len(shards)} "
                f"token files (they are named {some}{', ...' * (len(shards) > NAMES_SHOWN)}). "
                "Correct the pattern; it may match a file's name with or without its folder."
            )
    named = named_by(validation_files)
    counts = [sequences_of(shard.tokens, sequence_length=sequence_length) for shard in shards]
    # Exact decimal arithmetic: as floats, 0.07 * 100 is slightly more than 7.
    share = Fraction(0 if validation_files else str(validation_fraction)) * sum(counts)
    left, train, validation = sum(counts) - math.ceil(share), [], []
    for index, count in enumerate(counts):
        training = 0 if index in named else min(left, count)
        left -= training
        if training:
            train.append(SequenceRange(first_shard + index, 0, training))
        if training < count:
            span = SequenceRange(first_shard + index, training, count - training)
            validation.append(span)
    split = Split(tuple(train), tuple(validation))
    if not split.train:
        others = [shard for index, shard in enumerate(shards) if index not in named]
        if not others:
            reason = f"data.validation_files matches all {counted(len(shards), 'token file')}. "
            reason += "Name fewer files there, or leave it empty and set data.validation_fraction."
        elif not named and split.validation:
            held_out = counted(sequence_count(split.validation), "sequence")
            reason = f"data.validation_fraction takes all {held_out} of {sequence_length} tokens. "
            reason += "Lower it, shorten model.sequence_length, or add token files."
        else:
            reason = _too_short(others, sequence_length)
            reason += ", or use longer token files (joining short ones)."
        raise ShardError(f"no training sequence: {reason}")
    if named and not split.validation:
        too_short = _too_short([shards[index] for index in sorted(named)], sequence_length)
        raise ShardError(
            f"no validation sequence: {too_short}, or name longer files in data.validation_files."
        )
    return split


def _too_short(shards: Sequence[Shard], sequence_length: int) -> str:
    longest = max(shards, key=lambda shard: shard.tokens)
    return (
        f"the longest of {len(shards)} files, {longest.name}, has {longest.tokens} tokens, but a "
        f"sequence needs {sequence_length + 1} (model.sequence_length={sequence_length} and one "
        f"more). Set model.sequence_length to at most {max(1, longest.tokens - 1)}"
    )


def spread_sequences(
    ranges: Sequence[SequenceRange], *, sequences: int, skipped: Collection[int] = ()
) -> Located:
    """Return up to `sequences` evenly spaced sequences of the ranges, in one dimension.

    Those of `skipped` shards are removed after the choice, so that the others stay the same.
    """
    total = sequence_count(ranges)
    taken = min(sequences, total)
    places = np.arange(taken, dtype=np.int64) * total // max(1, taken)
    starts = np.cumsum([0, *(span.count for span in ranges)], dtype=np.int64)
    slots = np.searchsorted(starts, places, side="right") - 1
    firsts = np.array([span.first for span in ranges], dtype=np.int64)
    shards = np.array([span.shard for span in ranges], dtype=np.int64)[slots]
    kept = ~np.isin(shards, list(skipped))
    return Located(shards[kept], (firsts[slots] + places - starts[slots])[kept])


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """How much of the stream all ranks together have consumed."""

    epoch: int = 0  # complete passes; of a mixture, by every source
    sequences: int = 0  # consumed in the present pass; of a mixture, since the run started
    sources: Mapping[str, int] | None = (
        None  # of a mixture: sequences of each since the run started
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the form saved in a checkpoint's JSON."""
        saved: dict[str, Any] = {"epoch": self.epoch, "sequences": self.sequences}
        return saved if self.sources is None else saved | {"sources": dict(self.sources)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Position:
        """Parse the form of `to_dict`; raise `CheckpointError` for anything else."""
        sources = saved.get("sources", {})
        has_keys = isinstance(sources, dict) and set(saved) - {"sources"} == {"epoch", "sequences"}
        numbers = [saved["epoch"], saved["sequences"], *sources.values()] if has_keys else []
        if not has_keys or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
            raise CheckpointError(
                f"the data position of the checkpoint is {dict(saved)!r}, but it must be `epoch`, "
                "`sequences` and, of a mixture, `sources`, all non-negative integers. The file was "
                "changed or is of another program: resume from another checkpoint."
            )
        return cls(**saved)
