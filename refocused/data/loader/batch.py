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

    Inputs and labels are views of the same rows: a token is widened to int64, and copied to a GPU,
    once. Label t is token t + 1 of the text; `IGNORED_LABEL` in the rows that only fill up a
    validation batch, and where documents are masked and the next token begins another one.
    """

    input_ids: torch.Tensor  # [micro, sequence_length], int64; zeros in the rows that only fill up
    labels: torch.Tensor  # the same shape
    shards: NDArray[np.int64]  # [rows]: shard of each row that holds a window
    windows: NDArray[np.int64]  # [rows]: index of that window in its shard
    names: Sequence[str]  # of all shards of the manifest
    source: str | None = None  # of a mixture that all rows are from
    counted_labels: int | None = None  # those not ignored, where documents are masked; None: all

    def describe(self) -> str:
        """Name the windows for a message: `a.npy windows 17, 90-92; b.npy window 4`."""
        parts = []
        for shard in np.unique(self.shards).tolist():
            windows = sorted(self.windows[self.shards == shard].tolist())
            runs = []
            for _, group in itertools.groupby(enumerate(windows), lambda pair: pair[1] - pair[0]):
                run = [window for _, window in group]
                runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            noun = "window" if len(windows) == 1 else "windows"
            parts.append(f"{self.names[shard]} {noun} {', '.join(runs)}")
        return "; ".join(parts)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """The rows of several passes in one piece of memory, read and copied together."""

    # [passes, micro, sequence_length + 1], int64, contiguous: each window and the next token
    tokens: torch.Tensor
    # [passes, micro, sequence_length]; None: every token is a label
    masked_labels: torch.Tensor | None
    shards: NDArray[np.int64]  # [passes, rows], rows at most micro
    windows: NDArray[np.int64]  # [passes, rows]
    names: Sequence[str]
    counted_labels: Sequence[int] | None = None  # of each pass, where documents are masked

    def batches(self) -> list[Batch]:
        """Return each pass; views of all are made in one call, which is much of their cost."""
        labels = self.tokens[..., 1:] if self.masked_labels is None else self.masked_labels
        counted: Sequence[int | None] = self.counted_labels or [None] * len(self.shards)
        inputs = self.tokens[..., :-1].unbind()
        return [
            Batch(one, its_labels, shards, windows, self.names, counted_labels=count)
            for one, its_labels, shards, windows, count in zip(
                inputs, labels.unbind(), self.shards, self.windows, counted, strict=True
            )
        ]


class BatchReader:
    """Reads windows out of local shards into tensors.

    With `pin` they are page-locked, so that a copy to a GPU runs beside the computation. A
    `document_id` begins each document and is no label, so that nothing is learned across a border.
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
        # By type: memory for rows as they are stored, kept from one read to the next, and views of
        # the rows, which would cost 1 us a batch if made anew.
        self._stages: dict[np.dtype[Any], tuple[NDArray[Any], list[memoryview]]] = {}

    def read(self, shards: NDArray[np.int64], windows: NDArray[np.int64], *, micro: int) -> Passes:
        """Read passes of `micro` rows; those without a window are zeros with ignored labels.

        `shards` and `windows` have the shape [passes, rows], at most `micro` rows. The tensors have
        memory of their own for as long as one of them is used. Raises `ShardError` if a shard does
        not become local.
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
        masked = counted = None
        if self._document_id is not None or rows < micro:
            masked = self._empty(passes, micro, self._sequence_length)
            labels = masked.numpy()
            labels[:] = into[..., 1:]
            labels[:, rows:] = IGNORED_LABEL
            if self._document_id is not None:
                labels[labels == self._document_id] = IGNORED_LABEL
                counted = np.count_nonzero(labels != IGNORED_LABEL, axis=(1, 2)).tolist()
        return Passes(tokens, masked, shards, windows, self._cache.names, counted)

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
            stage, views = self._stage(kind, rows=len(rows))
            for row, tokens in zip(rows, views, strict=False):
                files[row].read_into(tokens, first=firsts[row])
            staged = stage[: len(rows)]
            if staged.max() >= self._cache.vocabulary:
                at = int((staged >= self._cache.vocabulary).any(1).argmax())
                name, window = self._cache.names[shards[rows[at]]], int(windows[rows[at]])
                raise ShardError(
                    f"{name} window {window}: the id {int(staged[at].max()):,} was read from the "
                    f"local copy, and the model's vocabulary ends at "
                    f"{self._cache.vocabulary - 1:,}. The copy has changed since it was verified: "
                    "check the disk of data.cache and the machine's memory, and start again, which "
                    "verifies it and fetches it anew."
                )
            # One type in all shards is the rule, and a slice is filled faster than a list of rows.
            into[slice(None) if len(rows) == len(files) else rows] = staged

    def _stage(self, kind: np.dtype[Any], *, rows: int) -> tuple[NDArray[Any], list[memoryview]]:
        stage = self._stages.get(kind)
        if stage is None or len(stage[0]) < rows:
            tokens = np.empty((rows, self._sequence_length + 1), kind)
            stage = self._stages[kind] = tokens, [memoryview(row) for row in tokens]
        return stage

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, pin_memory=self._pin)
