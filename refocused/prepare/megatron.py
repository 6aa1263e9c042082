"""Megatron's indexed form: a `.bin` of ids with an `.idx` that says where documents end."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from refocused.data.formats.token_blocks import Ids
from refocused.prepare.document_streams import Lengths, document_blocks
from refocused.system.errors import ShardError

# NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py: magic, version, dtype code, numbers
# of sequences and of document boundaries; then int32 lengths, int64 pointers, int64 boundaries.
MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclasses.dataclass(frozen=True, slots=True)
class MegatronIndex:
    """What an `.idx` says.

    Attributes:
        dtype: Element type of the `.bin`.
        lengths: `(documents,)`: ids of each document.
    """

    dtype: np.dtype[Any]
    lengths: Lengths


def read_index(index: Path, content: Path, *, name: str) -> MegatronIndex:
    """Read an `.idx` and compare it with its `.bin`.

    Raises:
        ShardError: It is of another form or version, truncated, or does not fit the `.bin`.
    """
    size = index.stat().st_size
    with index.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or header[: len(MAGIC)] != MAGIC:
        raise ShardError(
            f"{name}: it starts with {header[:9]!r}, not as Megatron's index. {_AGAIN}"
        )
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != 1 or code not in _TYPES:
        raise ShardError(
            f"{name}: version {version} and element type {code}; read are version 1 and the types "
            f"{', '.join(map(str, _TYPES))}, which are whole numbers. {_AGAIN}"
        )
    if size != _HEADER.size + 12 * sequences + 8 * boundaries or not sequences:
        raise ShardError(
            f"{name}: {sequences:,} sequences and {boundaries:,} document boundaries do not fit "
            f"its {size:,} bytes; it is truncated or its header is wrong. {_AGAIN}"
        )
    dtype = np.dtype(_TYPES[code])
    at = _HEADER.size
    counts = np.memmap(index, "<i4", "r", at, (sequences,)).astype(np.int64)
    pointers = np.memmap(index, "<i8", "r", at + 4 * sequences, (sequences,))
    ends = np.memmap(index, "<i8", "r", at + 12 * sequences, (boundaries,))
    starts = np.concatenate([[0], np.cumsum(counts)])
    fits = starts[-1] * dtype.itemsize == content.stat().st_size
    if counts.min() < 0 or not fits or not np.array_equal(pointers, starts[:-1] * dtype.itemsize):
        raise ShardError(
            f"{name}: its sequences do not lie one after the other in {content.name}, or do not "
            f"fill its {content.stat().st_size:,} bytes. {_AGAIN}"
        )
    if not boundaries or ends[0] != 0 or ends[-1] != sequences or np.any(np.diff(ends) < 0):
        raise ShardError(f"{name}: its document boundaries do not cover its sequences. {_AGAIN}")
    return MegatronIndex(dtype, np.diff(starts[ends]))


def megatron_blocks(
    index: Path, content: Path, *, separator_id: int | None, name: str
) -> Iterator[Ids]:
    """Yield the ids of a pair, a separator between documents unless they end with it.

    Raises:
        ShardError: The index is wrong, or an id is negative.
    """
    found = read_index(index, content, name=name)
    with content.open("rb") as file:
        yield from document_blocks(
            file, dtype=found.dtype, lengths=found.lengths, separator_id=separator_id, name=name
        )


_AGAIN = "Write the pair again, or put its names in data.exclude."
