"""Micro-batches, and reading their sequences from local shards."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from refocused.system.errors import ShardError

if TYPE_CHECKING:
    from refocused.data.cache.cache import ShardCache

IGNORED_LABEL = -100  # torch's cross entropy leaves it out of the loss
STAGED_TOKENS = 1 << 17  # read at once, before they become int64: 256 KiB of uint16


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The sequences of one pass on one rank.

    Label t is the token after input t. It is `IGNORED_LABEL` in rows without a sequence, which fill
    up a validation batch, and where documents are masked and the next token begins a document.
    Inputs and labels are views of the same memory, so each token is copied to a GPU once.
    """

    input_ids: (
        torch.Tensor
    )  # int64 [micro_batch_size, sequence_length]; zeros in rows without a sequence
    labels: torch.Tensor  # int64 [micro_batch_size, sequence_length]
    shards: NDArray[np.int64]  # [rows]: index of each sequence's shard in the manifest
    sequences: NDArray[np.int64]  # [rows]: index of each sequence in its shard
    names: Sequence[str]  # of all shards of the manifest
    source: str | None = None  # source of a mixture that all sequences are from
    counted_labels: int | None = None  # labels not ignored where documents are masked; None: all

    def describe(self) -> str:
        """Name the sequences for a message: `a.npy sequences 17, 90-92; b.npy sequence 4`."""
        parts = []
        for shard in np.unique(self.shards).tolist():
            sequences = sorted(self.sequences[self.shards == shard].tolist())
            runs = []
            for _, group in itertools.groupby(enumerate(sequences), lambda pair: pair[1] - pair[0]):
                run = [sequence for _, sequence in group]
                runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            noun = "sequence" if len(sequences) == 1 else "sequences"
            parts.append(f"{self.names[shard]} {noun} {', '.join(runs)}")
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MicroBatches:
    """The sequences of several micro-batches in one tensor, read and copied together."""

    tokens: torch.Tensor  # int64 [micro_batches, micro_batch_size, sequence_length + 1], contiguous
    shards: NDArray[
        np.int64
    ]  # [micro_batches, rows], as in `Batch`; rows is at most micro_batch_size
    sequences: NDArray[np.int64]  # [micro_batches, rows]
    names: Sequence[str]  # of all shards of the manifest
    document_id: int | None = None  # never a label; None: every token is one
    counted_labels: Sequence[int] | None = None  # [micro_batches]; None: all labels count

    def batches(self) -> list[Batch]:
        """Return each pass, on the device of the tokens.

        One call makes the views of all, which is faster than one each. Views of page-locked memory
        are not contiguous, so that torch would copy them through other memory: copy the tokens.
        """
        labels, rows = self.tokens[..., 1:], self.shards.shape[1]
        if self.document_id is not None:
            labels = labels.masked_fill(labels == self.document_id, IGNORED_LABEL)
        if rows < labels.shape[1]:
            labels = labels.clone()
            labels[:, rows:] = IGNORED_LABEL
        counted: Sequence[int | None] = self.counted_labels or [None] * len(self.shards)
        inputs = self.tokens[..., :-1].unbind()
        return [
            Batch(input_ids, labels_of_batch, shards, sequences, self.names, counted_labels=count)
            for input_ids, labels_of_batch, shards, sequences, count in zip(
                inputs, labels.unbind(), self.shards, self.sequences, counted, strict=True
            )
        ]


class BatchReader:
    """Reads sequences of local shards into tensors.

    `pin` makes the tensors page-locked, so that a copy to a GPU overlaps the computation. The id
    `document_id`, which begins each document, is never a label. None: every token is a label.
    """

    def __init__(
        self,
        cache: ShardCache,
        *,
        sequence_length: int,
        pin: bool = False,
        document_id: int | None = None,
    ) -> None:
        self._cache = cache
        self._sequence_length = sequence_length
        self._pin = pin
        self._document_id = document_id
        # By type: a buffer for rows as they are stored, and views of its rows. Both are kept,
        # because new views cost 1 us a batch.
        self._stages: dict[np.dtype[Any], tuple[NDArray[Any], list[memoryview]]] = {}

    def read(
        self, shards: NDArray[np.int64], sequences: NDArray[np.int64], *, micro_batch_size: int
    ) -> MicroBatches:
        """Read micro-batches of `micro_batch_size` rows; the others are zeros.

        `shards` and `sequences` have the shape [micro_batches, rows], with at most
        `micro_batch_size` rows. Each call returns tensors with memory of their own.

        Raises:
            ShardError: A shard does not become local, or holds an id beyond the vocabulary.
        """
        micro_batches, rows = shards.shape
        shape = micro_batches, micro_batch_size, self._sequence_length + 1
        tokens = torch.empty(shape, dtype=torch.int64, pin_memory=self._pin)
        into = tokens.numpy()
        if rows == micro_batch_size:
            self._fill(
                into.reshape(micro_batches * micro_batch_size, -1),
                shards.ravel(),
                sequences.ravel(),
            )
        else:
            into[:, rows:] = 0
            for micro_batch, of_shards, of_sequences in zip(into, shards, sequences, strict=True):
                self._fill(micro_batch[:rows], of_shards, of_sequences)
        counted, document_id = None, self._document_id
        if document_id is not None:
            counted = np.count_nonzero(into[:, :rows, 1:] != document_id, axis=(1, 2)).tolist()
        return MicroBatches(tokens, shards, sequences, self._cache.names, document_id, counted)

    def _fill(
        self, into: NDArray[np.int64], shards: NDArray[np.int64], sequences: NDArray[np.int64]
    ) -> None:
        """Read rows, as many at a time as stay in a core's cache until they become int64."""
        at_once = max(1, STAGED_TOKENS // self._sequence_length)
        for start in range(0, len(into), at_once):
            some = slice(start, start + at_once)
            target, chosen = into[some], shards[some].tolist()
            files = [self._cache.open(shard) for shard in chosen]
            firsts = (sequences[some] * self._sequence_length).tolist()
            for kind in {file.dtype for file in files}:
                rows = [row for row, file in enumerate(files) if file.dtype == kind]
                if kind not in self._stages or len(self._stages[kind][0]) < len(rows):
                    stage = np.empty((len(rows), self._sequence_length + 1), kind)
                    self._stages[kind] = stage, [memoryview(row) for row in stage]
                stage, views = self._stages[kind]
                for row, tokens in zip(rows, views, strict=False):
                    files[row].read_into(tokens, first=firsts[row])
                staged = stage[: len(rows)]
                vocabulary = self._cache.vocabulary
                if staged.max() >= vocabulary:
                    row = int((staged >= vocabulary).any(1).argmax())
                    name, sequence = self._cache.names[chosen[rows[row]]], start + rows[row]
                    raise ShardError(
                        f"{name} sequence {int(sequences[sequence])}: the id "
                        f"{int(staged[row].max()):,} was read from the local copy, and the model's "
                        f"vocabulary ends at {vocabulary - 1:,}. The copy has changed since it was "
                        "verified: check the disk of data.cache and the machine's memory, and "
                        "start again. The start verifies the copy and downloads it again."
                    )
                # Most data has one type in all shards; a slice is filled faster than listed rows.
                target[slice(None) if len(rows) == len(files) else rows] = staged
