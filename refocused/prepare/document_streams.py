"""Read documents that are contiguous in a file, as blocks of ids with separators."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from refocused.data.formats.object_names import unusable
from refocused.data.formats.token_blocks import BLOCK_IDS, Ids
from refocused.system.errors import ShardError

CHECKED_IDS = 1 << 22
Lengths = npt.NDArray[np.int64]


def document_blocks(
    file: BinaryIO, *, dtype: np.dtype[Any], lengths: Lengths, separator_id: int | None, name: str
) -> Iterator[Ids]:
    """Yield all documents' ids in order, with a separator after each that does not end with it.

    The last document gets none. `file` is at the first id. `lengths`, of shape (documents,), are
    the ids of each; empty documents are skipped. Raises `ShardError` if the file is too short, or
    an id is negative.
    """
    filled = lengths[lengths > 0]
    first, last_id = 0, None
    while first < len(filled):
        ends = np.cumsum(filled[first : first + BLOCK_IDS])
        count = max(int(np.searchsorted(ends, BLOCK_IDS, side="right")), 1)
        starts = np.concatenate([[0], ends[: count - 1]])
        left = int(ends[count - 1])
        while left:  # several blocks only if a document is longer than a block
            expected = min(left, BLOCK_IDS)
            ids = np.frombuffer(file.read(expected * dtype.itemsize), dtype)
            if len(ids) != expected:
                raise unusable(name, "it is shorter than its index says")
            if ids.min() < 0:
                raise unusable(name, f"it holds the negative id {ids.min()}")
            left -= len(ids)
            yield _separated(ids, starts, separator_id, last_id)
            last_id, starts = int(ids[-1]), starts[:0]
        first += count


def _separated(ids: Ids, starts: Ids, separator_id: int | None, last_id: int | None) -> Ids:
    """Insert the separator before the documents that start in a block, except the file's first."""
    if separator_id is None:
        return ids
    wide = ids.astype(np.int64)
    before = np.concatenate([[separator_id if last_id is None else last_id], wide[:-1]])
    return np.insert(wide, starts[before[starts] != separator_id], separator_id)


# NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py: magic, version, dtype code, number
# of sequences and of document boundaries; then int32 lengths, int64 pointers, int64 boundaries.
MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def megatron_blocks(
    index: Path, content: Path, *, separator_id: int | None, name: str
) -> Iterator[Ids]:
    """Yield the ids of an `.idx` and its `.bin`, as `document_blocks` does.

    Raises `ShardError` also if the index has another format or version, is truncated, or does not
    fit the `.bin`.
    """
    dtype, lengths = _read_index(index, content, name=name)
    filled = lengths[lengths > 0]
    if separator_id is None and len(filled) > 1:
        ends = np.cumsum(filled)
        ends = ends[: max(int(np.searchsorted(ends, CHECKED_IDS)), 2)]
        ids = np.memmap(content, dtype, "r", shape=(int(ends[-1]),))
        # They have an end-of-text id of their own if all end with one that is nowhere else.
        if not np.array_equal(np.flatnonzero(ids == ids[ends[0] - 1]) + 1, ends):
            raise ShardError(
                f"{name}: it holds {len(filled):,} documents, with no end-of-text id between them. "
                "Give the id to put there with --separator-id."
            )
    with content.open("rb") as file:
        yield from document_blocks(
            file, dtype=dtype, lengths=lengths, separator_id=separator_id, name=name
        )


def _read_index(index: Path, content: Path, *, name: str) -> tuple[np.dtype[Any], Lengths]:
    size = index.stat().st_size
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or header[: len(MAGIC)] != MAGIC:
        raise unusable(name, f"it starts with {header[:9]!r}, not as Megatron's index")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != 1 or code not in _TYPES:
        types = ", ".join(map(str, _TYPES))
        problem = f"its index has version {version} and element type {code}; only version 1 and"
        raise unusable(name, f"{problem} the integer types {types} are supported")
    if size != _HEADER.size + 12 * sequences + 8 * boundaries or not sequences:
        problem = f"{sequences:,} sequences and {boundaries:,} document boundaries do not fit"
        raise unusable(
            name, f"{problem} its {size:,} bytes; it is truncated or its header is wrong"
        )
    dtype = np.dtype(_TYPES[code])
    at = _HEADER.size
    counts = np.memmap(index, "<i4", "r", at, (sequences,)).astype(np.int64)
    pointers = np.memmap(index, "<i8", "r", at + 4 * sequences, (sequences,))
    ends = np.memmap(index, "<i8", "r", at + 12 * sequences, (boundaries,))
    starts = np.concatenate([[0], np.cumsum(counts)])
    fits = starts[-1] * dtype.itemsize == content.stat().st_size
    if counts.min() < 0 or not fits or not np.array_equal(pointers, starts[:-1] * dtype.itemsize):
        problem = f"its sequences are not contiguous in {content.name}, or do not fill its"
        raise unusable(name, f"{problem} {content.stat().st_size:,} bytes")
    if not boundaries or ends[0] != 0 or ends[-1] != sequences or np.any(np.diff(ends) < 0):
        raise unusable(name, "its document boundaries do not cover its sequences")
    return dtype, np.diff(starts[ends])
