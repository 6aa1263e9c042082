"""Micro-batches, and how their rows are read out of local shards."""

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

IGNORED_LABEL = -100  # what torch's cross entropy leaves out of the loss
STAGED_TOKENS = 1 << 17  # read before they are widened: 256 KiB of uint16


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows of one pass on one rank.

    Inputs and labels are views of the same rows: a token is widened to int64, and copied to a
    GPU, once.

    Attributes:
        input_ids: What the model reads: shape [micro, sequence_length], int64; zeros in the rows
            that only fill up a validation batch.
        labels: The label of position t, token t + 1 of the text: the shape of `input_ids`;
            `IGNORED_LABEL` in the rows that only fill up, and where documents are masked and the
            next token begins another one.
        shards: Shape [rows]: index of the shard of each row that holds a window.
        windows: Shape [rows]: index of that window in its shard.
        names: Names of all shards of the manifest.
        source: Source of a mixture that all rows are from, where they are of one.
        counted_labels: Labels that are not ignored, where documents are masked and rows differ in
            it; None: all of a training batch.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    shards: NDArray[np.int64]
    windows: NDArray[np.int64]
    names: Sequence[str]
    source: str | None = None
    counted_labels: int | None = None

    def describe(self) -> str:
        """Name the windows for a message: `a.npy windows 17, 90-92; b.npy window 4`."""
        parts = []
        for shard in np.unique(self.shards).tolist():
            windows = sorted(self.windows[self.shards == shard].tolist())
            noun = "window" if len(windows) == 1 else "windows"
            parts.append(f"{self.names[shard]} {noun} {_runs(windows)}")
        return "; ".join(parts)


def _runs(numbers: Sequence[int]) -> str:
    """Write sorted numbers with runs of neighbours drawn together: `17, 90-92`."""
    runs = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(runs)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """The rows of several passes in one piece of memory, read and copied together.

    Attributes:
        tokens: Shape [passes, micro, sequence_length + 1], int64, contiguous: the windows, each
            with the token that follows it.
        masked_labels: Shape [passes, micro, sequence_length]: the labels, where some of them are
            `IGNORED_LABEL`. None: every token is the label of the one before it.
        shards: Shape [passes, rows], rows at most micro: index of each window's shard.
        windows: Same shape: index of each window in its shard.
        names: Names of all shards of the manifest.
        counted_labels: Of each pass, where documents are masked.
    """

    tokens: torch.Tensor
    masked_labels: torch.Tensor | None
    shards: NDArray[np.int64]
    windows: NDArray[np.int64]
    names: Sequence[str]
    counted_labels: Sequence[int] | None = None

    def batches(self) -> list[Batch]:
        """Return each pass; views of all are made in one call, which is much of their cost."""
        labels = self.tokens[..., 1:] if self.masked_labels is None else self.masked_labels
        counted: Sequence[int | None] = self.counted_labels or [None] * len(self.shards)
        return [
            Batch(inputs, labels, shards, windows, self.names, counted_labels=count)
            for inputs, labels, shards, windows, count in zip(
                self.tokens[..., :-1].unbind(),
                labels.unbind(),
                self.shards,
                self.windows,
                counted,
                strict=True,
            )
        ]


class BatchReader:
    """Reads windows out of local shards into tensors.

    Args:
        cache: Gives the local shards.
        sequence_length: Tokens a window trains on.
        names: Names of all shards of the manifest.
        pin: Make page-locked tensors, from which a copy to a GPU runs beside the computation.
        document_id: Id that begins each document and is no label, so that nothing is learned
            across a border; None: every token is a label.
    """

    def __init__(
        self,
        cache: ShardCache,
        *,
        sequence_length: int,
        names: Sequence[str],
        pin: bool,
        document_id: int | None = None,
    ) -> None:
        self._cache = cache
        self._sequence_length = sequence_length
        self._names = names
        self._pin = pin
        self._document_id = document_id
        self._stages: dict[np.dtype[Any], _Stage] = {}

    def read(self, shards: NDArray[np.int64], windows: NDArray[np.int64], *, micro: int) -> Passes:
        """Read passes; their rows beyond the given windows are zeros with ignored labels.

        They have memory of their own for as long as one of their tensors is used.

        Args:
            shards: Shape [passes, rows], at most `micro` rows: index of each window's shard.
            windows: Same shape: index of each window in its shard.
            micro: Rows of a pass.

        Raises:
            ShardError: A shard does not become local.
        """
        passes, rows = shards.shape
        tokens = self._empty(passes, micro, self._sequence_length + 1)
        into = tokens.numpy()
        if rows == micro:
            self._fill(into.reshape(passes * micro, -1), shards.ravel(), windows.ravel())
        else:
            into[:, rows:] = 0
            for own, of_shards, of_windows in zip(into, shards, windows, strict=True):
                self._fill(own[:rows], of_shards, of_windows)
        masked_labels = self._masked_labels(tokens, rows=rows)
        counted_labels = None
        if self._document_id is not None:
            assert masked_labels is not None  # these documents mask it
            counted = np.count_nonzero(masked_labels.numpy() != IGNORED_LABEL, axis=(1, 2))
            counted_labels = counted.tolist()
        return Passes(tokens, masked_labels, shards, windows, self._names, counted_labels)

    def _fill(
        self, into: NDArray[np.int64], shards: NDArray[np.int64], windows: NDArray[np.int64]
    ) -> None:
        """Read rows, as many at a time as stay in a core's own cache until they are widened."""
        at_once = max(1, STAGED_TOKENS // self._sequence_length)
        for start in range(0, len(into), at_once):
            some = slice(start, start + at_once)
            self._fill_some(into[some], shards[some].tolist(), windows[some])

    def _fill_some(
        self, into: NDArray[np.int64], shards: list[int], windows: NDArray[np.int64]
    ) -> None:
        files = [self._cache.open(shard) for shard in shards]
        firsts = (windows * self._sequence_length).tolist()
        for kind in {file.dtype for file in files}:
            rows = [row for row, file in enumerate(files) if file.dtype == kind]
            stage = self._stage(kind, rows=len(rows))
            for row, tokens in zip(rows, stage.rows, strict=False):
                files[row].read_into(tokens, first=firsts[row])
            if stage.tokens[: len(rows)].max() >= self._cache.vocabulary:
                at = int((stage.tokens[: len(rows)] >= self._cache.vocabulary).any(1).argmax())
                raise self._unknown_id(stage.tokens[at], shards[rows[at]], int(windows[rows[at]]))
            # One type in all shards is the rule, and a slice is filled faster than a list of rows.
            into[slice(None) if len(rows) == len(files) else rows] = stage.tokens[: len(rows)]

    def _unknown_id(self, tokens: NDArray[Any], shard: int, window: int) -> ShardError:
        return ShardError(
            f"{self._names[shard]} window {window}: the id {int(tokens.max()):,} was read from the "
            f"local copy, and the model's vocabulary ends at {self._cache.vocabulary - 1:,}. The "
            "copy has changed since it was verified: check the disk of data.cache and the "
            "machine's memory, and start again, which verifies it and fetches it anew."
        )

    def _masked_labels(self, tokens: torch.Tensor, *, rows: int) -> torch.Tensor | None:
        """Return the labels in memory of their own where not every one of them counts."""
        passes, micro, _ = tokens.shape
        if self._document_id is None and rows == micro:
            return None
        masked = self._empty(passes, micro, self._sequence_length)
        labels = masked.numpy()
        labels[:] = tokens[..., 1:].numpy()
        labels[:, rows:] = IGNORED_LABEL
        if self._document_id is not None:
            labels[labels == self._document_id] = IGNORED_LABEL
        return masked

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, pin_memory=self._pin)

    def _stage(self, kind: np.dtype[Any], *, rows: int) -> _Stage:
        stage = self._stages.get(kind)
        if stage is None or len(stage.rows) < rows:
            stage = self._stages[kind] = _Stage(kind, rows=rows, length=self._sequence_length + 1)
        return stage


class _Stage:
    """Memory for rows as they are stored, kept from one read to the next.

    Attributes:
        tokens: Shape [rows, sequence_length + 1].
        rows: The bytes of each row.
    """

    def __init__(self, kind: np.dtype[Any], *, rows: int, length: int) -> None:
        self.tokens = np.empty((rows, length), kind)
        self.rows = [memoryview(row) for row in self.tokens]  # made anew they cost 1 us a batch
