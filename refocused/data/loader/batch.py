"""Micro-batches, and reading their windows from local shards."""

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
    """The windows of one pass on one rank.

    Label t is the token after input t. It is `IGNORED_LABEL` in rows without a window, which fill
    up a validation batch, and where documents are masked and the next token begins a document.
    Inputs and labels are views of the same memory, so each token is copied to a GPU once.
    """

    input_ids: torch.Tensor  # int64 [micro, sequence_length]; zeros in rows without a window
    labels: torch.Tensor  # int64 [micro, sequence_length]
    shards: NDArray[np.int64]  # [rows]: index of each window's shard in the manifest
    windows: NDArray[np.int64]  # [rows]: index of each window in its shard
    names: Sequence[str]  # of all shards of the manifest
    source: str | None = None  # source of a mixture that all windows are from
    counted_labels: int | None = None  # labels not ignored where documents are masked; None: all

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
    """The windows of several passes in one tensor, read and copied together."""

    tokens: torch.Tensor  # int64 [passes, micro, sequence_length + 1], contiguous
    shards: NDArray[np.int64]  # [passes, rows], as in `Batch`; rows is at most micro
    windows: NDArray[np.int64]  # [passes, rows]
    names: Sequence[str]  # of all shards of the manifest
    document_id: int | None = None  # never a label; None: every token is one
    counted_labels: Sequence[int] | None = None  # [passes]; None: all labels count

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
            Batch(one, its_labels, shards, windows, self.names, counted_labels=count)
            for one, its_labels, shards, windows, count in zip(
                inputs, labels.unbind(), self.shards, self.windows, counted, strict=True
            )
        ]


class BatchReader:
    """Reads windows of local shards into tensors.

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

    def read(self, shards: NDArray[np.int64], windows: NDArray[np.int64], *, micro: int) -> Passes:
        """Read passes of `micro` rows; rows without a window are zeros with ignored labels.

        `shards` and `windows` have the shape [passes, rows], with at most `micro` rows. Each call
        returns tensors with memory of their own.

        Raises:
            ShardError: A shard does not become local, or holds an id beyond the vocabulary.
        """
        passes, rows = shards.shape
        shape = passes, micro, self._sequence_length + 1
        tokens = torch.empty(shape, dtype=torch.int64, pin_memory=self._pin)
        into = tokens.numpy()
        if rows == micro:
            self._fill(into.reshape(passes * micro, -1), shards.ravel(), windows.ravel())
        else:
            into[:, rows:] = 0
            for own, of_shards, of_windows in zip(into, shards, windows, strict=True):
                self._fill(own[:rows], of_shards, of_windows)
        counted, document_id = None, self._document_id
        if document_id is not None:
            counted = np.count_nonzero(into[:, :rows, 1:] != document_id, axis=(1, 2)).tolist()
        return Passes(tokens, shards, windows, self._cache.names, document_id, counted)

    def _fill(
        self, into: NDArray[np.int64], shards: NDArray[np.int64], windows: NDArray[np.int64]
    ) -> None:
        """Read rows, as many at a time as stay in a core's cache until they become int64."""
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
                    "check the disk of data.cache and the machine's memory, and start again. The "
                    "start verifies the copy and downloads it again."
                )
            # Most data has one type in all shards, and a slice is filled faster than listed rows.
            into[slice(None) if len(rows) == len(files) else rows] = staged

    def _stage(self, kind: np.dtype[Any], *, rows: int) -> tuple[NDArray[Any], list[memoryview]]:
        stage = self._stages.get(kind)
        if stage is None or len(stage[0]) < rows:
            tokens = np.empty((rows, self._sequence_length + 1), kind)
            stage = self._stages[kind] = tokens, [memoryview(row) for row in tokens]
        return stage
