"""Documents that lie one after the other in a file, as blocks of ids with separators between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from refocused.data.formats.token_blocks import BLOCK_IDS, Ids
from refocused.system.errors import ShardError

Lengths = npt.NDArray[np.int64]


def document_blocks(
    file: BinaryIO,
    *,
    dtype: np.dtype[Any],
    lengths: Lengths,
    separator_id: int | None,
    name: str,
) -> Iterator[Ids]:
    """Yield all documents' ids in order.

    Args:
        file: Open where the first id is.
        dtype: Element type as stored.
        lengths: `(documents,)`: ids of each; empty documents are passed over.
        separator_id: Id put between two documents, unless the first ends with it; None: none is.
        name: Of the file, for messages.

    Raises:
        ShardError: The file ends before, or an id is negative.
    """
    filled = lengths[lengths > 0]
    first, last_id = 0, None
    while first < len(filled):
        ends = np.cumsum(filled[first : first + BLOCK_IDS])
        count = max(int(np.searchsorted(ends, BLOCK_IDS, side="right")), 1)
        starts = np.concatenate([[0], ends[: count - 1]])
        left = int(ends[count - 1])
        while left:  # more than one block only of a document that is longer than one
            ids = _read(file, min(left, BLOCK_IDS), dtype, name=name)
            left -= len(ids)
            yield _separated(ids, starts, separator_id, last_id)
            last_id, starts = int(ids[-1]), starts[:0]
        first += count


def _read(file: BinaryIO, count: int, dtype: np.dtype[Any], *, name: str) -> Ids:
    content = file.read(count * dtype.itemsize)
    if len(content) != count * dtype.itemsize:
        raise ShardError(
            f"{name}: it ends before its index says. Write the file again, or put its name in "
            "data.exclude."
        )
    ids = np.frombuffer(content, dtype)
    if ids.min() < 0:
        raise ShardError(
            f"{name}: it holds the id {ids.min()}, and ids are not negative. Write the file "
            "again, or put its name in data.exclude."
        )
    return ids


def _separated(ids: Ids, starts: Ids, separator_id: int | None, last_id: int | None) -> Ids:
    """Put the separator before the documents that start in a block, but not before the first."""
    if separator_id is None:
        return ids
    wide = ids.astype(np.int64)
    before = np.concatenate([[separator_id if last_id is None else last_id], wide[:-1]])
    return np.insert(wide, starts[before[starts] != separator_id], separator_id)
