"""The tokens of a file, block by block in bounded memory, without their padding."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from refocused.data.formats.object_names import unusable
from refocused.data.formats.object_reader import ByteSource, member_reader, opened_zip
from refocused.data.formats.token_layout import LENGTHS_KEY, MASK_KEY, ArrayPlace, TokenLayout
from refocused.system.errors import ShardError

BLOCK_IDS = 1 << 16  # 128 KiB of uint16, 512 of int64: they stay in the processor's cache
LONGEST_ROW = 1 << 22

Ids = npt.NDArray[Any]
Kept = npt.NDArray[np.bool]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenCount:
    """What a file holds."""

    tokens: int  # separators included, padding not
    rows: int | None  # with at least one token, where rows are padded; None: a stream or full rows


def count_tokens(file: ByteSource, layout: TokenLayout, *, name: str) -> TokenCount:
    """Count the tokens, reading no more than the smallest array that tells.

    That is the header alone for streams and full rows, else the lengths, else the mask; rows that
    only a pad id marks have to be read whole. Raises `ShardError` if the file is truncated, or its
    lengths or mask cannot be.
    """
    if not layout.padded:
        return TokenCount(layout.ids.elements, None)
    tokens, filled, rows = 0, 0, _rows_at_once(layout, name=name)
    telling = layout.lengths or layout.mask or layout.ids
    with _opened(file, layout, name=name) as archive:
        for block in _blocks(file, archive, telling, rows=rows, name=name):
            if layout.lengths:
                kept = _checked_lengths(block, layout, name=name)
            else:
                kept = _kept(block, layout, name=name).sum(axis=1, dtype=np.int64)
            tokens += int(kept.sum())
            filled += int(np.count_nonzero(kept))
    if not tokens:
        raise ShardError(f"{name}: every row is padding. Put its name in data.exclude.")
    between = filled - 1 if layout.separator_id is not None else 0
    return TokenCount(tokens + between, filled)


def token_blocks(file: ByteSource, layout: TokenLayout, *, name: str) -> Iterator[Ids]:
    """Yield all tokens in order as 1-D arrays of about `BLOCK_IDS` ids, as stored.

    Raises `ShardError` if the file is truncated or corrupt, or an id that is no padding is
    negative.
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
                    f"{name}: it holds the id {block.min()}, and ids are not negative. Write the "
                    "file again, or put its name in data.skip."
                )
            yield block


@contextlib.contextmanager
def _opened(
    file: ByteSource, layout: TokenLayout, *, name: str
) -> Iterator[zipfile.ZipFile | None]:
    if layout.ids.member is None:
        yield None
    else:
        with opened_zip(file, name=name) as archive:
            yield archive


def _blocks(
    file: ByteSource, archive: zipfile.ZipFile | None, place: ArrayPlace, *, rows: int, name: str
) -> Iterator[Ids]:
    """Yield an array `rows` rows at a time, or that many elements of a stream."""
    row_bytes = place.dtype.itemsize * math.prod(place.shape[1:])
    if place.member is not None and archive is not None:
        read = member_reader(file, archive, place.member, offset=place.offset)
    else:
        file.seek(place.offset)
        read = file.read
    for first in range(0, place.shape[0], rows):
        count = min(rows, place.shape[0] - first)
        content = read(count * row_bytes)
        if len(content) != count * row_bytes:
            raise unusable(name, "it ends before its header says")
        yield np.frombuffer(content, place.dtype).reshape(count, *place.shape[1:])
    if place.member is not None:
        read(1)  # at its end, the member's CRC-32 is compared


def _rows_at_once(layout: TokenLayout, *, name: str) -> int:
    columns = layout.ids.shape[1]
    if columns > LONGEST_ROW:
        raise ShardError(
            f"{name}: its rows have {columns:,} columns, and padding is looked for in rows of at "
            f"most {LONGEST_ROW:,}. Write the tokens as one stream, or exclude the file."
        )
    return max(BLOCK_IDS // columns, 1)


def _row_blocks(
    file: ByteSource, archive: zipfile.ZipFile | None, layout: TokenLayout, *, name: str
) -> Iterator[Ids]:
    rows, started = _rows_at_once(layout, name=name), False
    telling = layout.lengths or layout.mask
    tells = _blocks(file, archive, telling, rows=rows, name=name) if telling else None
    for block in _blocks(file, archive, layout.ids, rows=rows, name=name):
        kept = _kept(next(tells) if tells else block, layout, name=name)
        yield _joined(block, kept, separator_id=layout.separator_id, started=started)
        started = started or bool(kept.any())
    if tells:
        next(tells, None)  # let the second member reach its end, where its CRC-32 is compared


def _kept(tells: Ids, layout: TokenLayout, *, name: str) -> Kept:
    """Return which ids of some rows are tokens, by lengths, mask or the ids: (rows, columns)."""
    if layout.lengths:
        lengths = _checked_lengths(tells, layout, name=name)
        return np.arange(layout.ids.shape[1]) < lengths[:, None]
    if layout.mask:
        if tells.min() < 0 or tells.max() > 1:
            found = f"{MASK_KEY} holds {tells.min()} to {tells.max()}"
            raise unusable(name, f"{found}; it says 1 for a token and 0 for padding")
        return np.asarray(tells == 1)
    is_token = tells != layout.pad_id
    # A token keeps all that is left of it: the running maximum from the right.
    kept: Kept = np.logical_or.accumulate(is_token[:, ::-1], axis=1)[:, ::-1]
    return kept


def _checked_lengths(lengths: Ids, layout: TokenLayout, *, name: str) -> npt.NDArray[np.int64]:
    columns = layout.ids.shape[1]
    if lengths.min() < 0 or lengths.max() > columns:
        found = f"{LENGTHS_KEY} holds {lengths.min()} to {lengths.max()}"
        raise unusable(name, f"{found} for rows of {columns} ids")
    return lengths.astype(np.int64)


def _joined(block: Ids, kept: Kept, *, separator_id: int | None, started: bool) -> Ids:
    """Return the tokens of rows one after the other, a separator before all but the first."""
    if separator_id is None:
        return block[kept]
    before: Kept = np.logical_or.reduce(kept, axis=1)
    if not started and before.any():
        before[np.argmax(before)] = False
    separators = np.full((len(block), 1), separator_id, np.int64)
    wide = np.concatenate([separators, block.astype(np.int64, copy=False)], axis=1)
    joined: Ids = wide[np.concatenate([before[:, None], kept], axis=1)]
    return joined
