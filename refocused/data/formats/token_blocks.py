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

from refocused.data.formats.layout import ArrayPlace, TokenLayout
from refocused.data.formats.object_reader import ByteSource, member_reader, opened_zip
from refocused.system.errors import ShardError

BLOCK_IDS = 1 << 16  # 128 KiB of uint16, 512 of int64: they stay in the processor's cache
LONGEST_ROW = 1 << 22

Ids = npt.NDArray[Any]
Kept = npt.NDArray[np.bool]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenCount:
    """What a file holds.

    Attributes:
        tokens: Real tokens, separators included, padding not.
        rows: Rows with at least one token, where rows are padded; None: a stream or full rows.
    """

    tokens: int
    rows: int | None


def count_tokens(file: ByteSource, layout: TokenLayout, *, name: str) -> TokenCount:
    """Count the tokens, reading no more than the smallest array that tells.

    That is the header alone for streams and full rows, else the lengths, else the mask; rows that
    only a pad id marks have to be read whole.

    Raises:
        ShardError: The file is truncated, or its lengths or mask cannot be.
    """
    if not layout.padded:
        return TokenCount(layout.ids.elements, None)
    tokens, filled = 0, 0
    with _opened(file, layout, name=name) as archive:
        for kept in _kept_rows(file, archive, layout, name=name):
            tokens += int(kept.sum())
            filled += int(np.count_nonzero(kept))
    if not tokens:
        raise ShardError(f"{name}: every row is padding. Put its name in data.exclude.")
    between = filled - 1 if layout.separator_id is not None else 0
    return TokenCount(tokens + between, filled)


def token_blocks(file: ByteSource, layout: TokenLayout, *, name: str) -> Iterator[Ids]:
    """Yield all tokens in order as 1-D arrays of about `BLOCK_IDS` ids, as stored.

    Raises:
        ShardError: The file is truncated or corrupt, or an id that is no padding is negative.
    """
    with _opened(file, layout, name=name) as archive:
        blocks = (
            _row_blocks(file, archive, layout, name=name)
            if layout.padded
            else _blocks(file, archive, layout.ids, rows=BLOCK_IDS, flat=True, name=name)
        )
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
    file: ByteSource,
    archive: zipfile.ZipFile | None,
    place: ArrayPlace,
    *,
    rows: int,
    name: str,
    flat: bool = False,
) -> Iterator[Ids]:
    """Yield an array `rows` rows at a time, or that many elements of it when `flat`."""
    shape = (place.elements,) if flat else place.shape
    row_bytes = place.dtype.itemsize * math.prod(shape[1:])
    if place.member is not None and archive is not None:
        read = member_reader(file, archive, place.member, offset=place.offset)
    else:
        file.seek(place.offset)
        read = file.read
    for first in range(0, shape[0], rows):
        count = min(rows, shape[0] - first)
        content = read(count * row_bytes)
        if len(content) != count * row_bytes:
            raise ShardError(
                f"{name}: it ends before its header says. Write the file again, or put its name "
                "in data.exclude."
            )
        yield np.frombuffer(content, place.dtype).reshape(count, *shape[1:])
    if place.member is not None:
        read(1)  # at its end, zipfile compares the member's CRC-32


def _rows_at_once(layout: TokenLayout, *, name: str) -> int:
    columns = layout.ids.shape[1] if len(layout.ids.shape) == 2 else 1
    if columns > LONGEST_ROW:
        raise ShardError(
            f"{name}: its rows have {columns:,} columns, and padding is looked for in rows of at "
            f"most {LONGEST_ROW:,}. Write the tokens as one stream, or exclude the file."
        )
    return max(BLOCK_IDS // columns, 1)


def _kept_rows(
    file: ByteSource, archive: zipfile.ZipFile | None, layout: TokenLayout, *, name: str
) -> Iterator[Ids]:
    """Yield how many tokens each row keeps, `(rows,)` int64 at a time."""
    rows = _rows_at_once(layout, name=name)
    if layout.lengths:
        for lengths in _blocks(file, archive, layout.lengths, rows=rows, name=name):
            yield _checked_lengths(lengths, layout, name=name)
        return
    place = layout.mask or layout.ids
    for block in _blocks(file, archive, place, rows=rows, name=name):
        yield _kept(block, block, layout, name=name).sum(axis=1, dtype=np.int64)


def _row_blocks(
    file: ByteSource, archive: zipfile.ZipFile | None, layout: TokenLayout, *, name: str
) -> Iterator[Ids]:
    rows = _rows_at_once(layout, name=name)
    telling = layout.lengths or layout.mask
    told: Iterator[Ids | None] = iter(lambda: None, 0)
    if telling:
        told = _blocks(file, archive, telling, rows=rows, name=name)
    started = False
    ids = _blocks(file, archive, layout.ids, rows=rows, name=name)
    for block, tells in zip(ids, told, strict=False):
        kept = _kept(block, tells, layout, name=name)
        yield _joined(block, kept, separator_id=layout.separator_id, started=started)
        started = started or bool(kept.any())
    if telling:
        next(told, None)  # let the second member reach its end, where its CRC-32 is compared


def _kept(block: Ids, tells: Ids | None, layout: TokenLayout, *, name: str) -> Kept:
    """Say which ids of a block of rows are tokens: `(rows, columns)` booleans."""
    if layout.lengths and tells is not None:
        lengths = _checked_lengths(tells, layout, name=name)
        return np.arange(layout.ids.shape[1]) < lengths[:, None]
    if layout.mask and tells is not None:
        if tells.min() < 0 or tells.max() > 1:
            raise ShardError(
                f"{name}: attention_mask holds {tells.min()} to {tells.max()}; it says 1 for a "
                "token and 0 for padding. Write the file again, or put its name in data.exclude."
            )
        ones: Kept = tells == 1
        return ones
    is_token = block != layout.pad_id
    # A token keeps all that is left of it: the running maximum from the right.
    kept: Kept = np.logical_or.accumulate(is_token[:, ::-1], axis=1)[:, ::-1]
    return kept


def _checked_lengths(lengths: Ids, layout: TokenLayout, *, name: str) -> npt.NDArray[np.int64]:
    columns = layout.ids.shape[1] if len(layout.ids.shape) == 2 else 0
    if lengths.min() < 0 or lengths.max() > columns:
        raise ShardError(
            f"{name}: sequence_lengths holds {lengths.min()} to {lengths.max()} for rows of "
            f"{columns} ids. Write the file again, or put its name in data.exclude."
        )
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
