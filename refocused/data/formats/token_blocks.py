"""Read the tokens of a file in blocks of bounded size, without padding."""

import contextlib
import dataclasses
import math
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from refocused.data.formats.object_names import unusable
from refocused.data.formats.object_reader import ByteSource, open_zip
from refocused.data.formats.token_layout import LENGTHS_KEY, MASK_KEY, ArrayPlace, TokenLayout
from refocused.system.errors import ShardError

BLOCK_IDS = 1 << 16  # 128 KiB of uint16, 512 KiB of int64: fits the processor's cache
MAX_COLUMNS = 1 << 22

Ids = npt.NDArray[Any]
Kept = npt.NDArray[np.bool]


def count_tokens(file: ByteSource, layout: TokenLayout, *, name: str) -> tuple[int, int | None]:
    """Count the tokens and rows of a file, reading as little of it as possible.

    Tokens are with separators, without padding; rows are padded ones that hold a token, None for
    streams and full rows.

    Streams and full rows need only the header, others their lengths or mask; rows padded by a pad
    id alone are read whole. Raises `ShardError` if the file is truncated or all padding, or its
    lengths or mask are invalid.
    """
    if not layout.padded:
        return layout.ids.elements, None
    tokens, filled, rows = 0, 0, _rows_per_block(layout, name=name)
    marks = layout.lengths or layout.mask or layout.ids
    with _opened(file, layout, name=name) as archive:
        for block in _blocks(file, archive, marks, rows=rows, name=name):
            if layout.lengths:
                kept = _checked_lengths(block, layout, name=name)
            else:
                kept = _kept(block, layout, name=name).sum(axis=1, dtype=np.int64)
            tokens += int(kept.sum())
            filled += int(np.count_nonzero(kept))
    if not tokens:
        raise ShardError(f"{name}: every row is padding. Put its name in data.exclude.")
    separators = filled - 1 if layout.separator_id is not None else 0
    return tokens + separators, filled


def token_blocks(file: ByteSource, layout: TokenLayout, *, name: str) -> Iterator[Ids]:
    """Yield all tokens in order as 1-D arrays of about `BLOCK_IDS` ids, as stored.

    Raises `ShardError` if the file is truncated or corrupt, or holds a negative id outside of
    padding.
    """
    with _opened(file, layout, name=name) as archive:
        if layout.padded:
            blocks = _row_blocks(file, archive, layout, name=name)
        else:
            stream = dataclasses.replace(layout.ids, shape=(layout.ids.elements,))
            blocks = _blocks(file, archive, stream, rows=BLOCK_IDS, name=name)
        for block in blocks:
            if block.dtype.kind == "i" and block.size and block.min() < 0:
                raise ShardError(
                    f"{name}: it holds the negative id {block.min()}. Write the file again, or put "
                    "its name in data.skip."
                )
            yield block


def _opened(
    file: ByteSource, layout: TokenLayout, *, name: str
) -> contextlib.AbstractContextManager[zipfile.ZipFile | None]:
    return contextlib.nullcontext() if layout.ids.member is None else open_zip(file, name=name)


def _blocks(
    file: ByteSource, archive: zipfile.ZipFile | None, place: ArrayPlace, *, rows: int, name: str
) -> Iterator[Ids]:
    """Yield an array in blocks of `rows` rows, or of that many elements of a stream."""
    row_bytes = place.dtype.itemsize * math.prod(place.shape[1:])
    source: IO[bytes] | ByteSource = file
    if place.member is not None and archive is not None:
        source = archive.open(place.member)  # refuses encrypted members and wrong local headers
    source.seek(place.offset)
    for first in range(0, place.shape[0], rows):
        count = min(rows, place.shape[0] - first)
        content = source.read(count * row_bytes)
        if len(content) != count * row_bytes:
            raise unusable(name, "it is shorter than its header says")
        yield np.frombuffer(content, place.dtype).reshape(count, *place.shape[1:])
    if place.member is not None:
        source.read(1)  # the end of the member, where its CRC-32 is verified


def _rows_per_block(layout: TokenLayout, *, name: str) -> int:
    columns = layout.ids.shape[1]
    if columns > MAX_COLUMNS:
        raise ShardError(
            f"{name}: its padded rows have {columns:,} columns; at most {MAX_COLUMNS:,} are "
            "supported. Write the tokens as one stream, or put the file's name in data.exclude."
        )
    return max(BLOCK_IDS // columns, 1)


def _row_blocks(
    file: ByteSource, archive: zipfile.ZipFile | None, layout: TokenLayout, *, name: str
) -> Iterator[Ids]:
    """Yield the tokens of some rows each, with a separator before each but the file's first."""
    rows, started = _rows_per_block(layout, name=name), False
    array = layout.lengths or layout.mask
    marks = _blocks(file, archive, array, rows=rows, name=name) if array else None
    for block in _blocks(file, archive, layout.ids, rows=rows, name=name):
        kept = _kept(next(marks) if marks else block, layout, name=name)
        if layout.separator_id is None:
            yield block[kept]
            continue
        before: Kept = np.logical_or.reduce(kept, axis=1)
        if not started and before.any():
            started, before[np.argmax(before)] = True, False
        separators = np.full((len(block), 1), layout.separator_id, np.int64)
        wide = np.concatenate([separators, block.astype(np.int64, copy=False)], axis=1)
        yield wide[np.concatenate([before[:, None], kept], axis=1)]
    if marks:
        next(marks, None)  # read this member to its end too, where its CRC-32 is verified


def _kept(marks: Ids, layout: TokenLayout, *, name: str) -> Kept:
    """Return a mask of the tokens in some rows, (rows, columns), from lengths, mask or ids."""
    if layout.lengths:
        lengths = _checked_lengths(marks, layout, name=name)
        return np.arange(layout.ids.shape[1]) < lengths[:, None]
    if layout.mask:
        if marks.min() < 0 or marks.max() > 1:
            values = f"{MASK_KEY} holds {marks.min()} to {marks.max()}"
            raise unusable(name, f"{values}; only 1 (token) and 0 (padding) are valid")
        return np.asarray(marks == 1)
    is_token = marks != layout.pad_id
    # Padding is the run of pad ids at the end of a row.
    kept: Kept = np.logical_or.accumulate(is_token[:, ::-1], axis=1)[:, ::-1]
    return kept


def _checked_lengths(lengths: Ids, layout: TokenLayout, *, name: str) -> npt.NDArray[np.int64]:
    columns = layout.ids.shape[1]
    if lengths.min() < 0 or lengths.max() > columns:
        values = f"{LENGTHS_KEY} holds {lengths.min()} to {lengths.max()}"
        raise unusable(name, f"{values} for rows of {columns} ids")
    return lengths.astype(np.int64)
