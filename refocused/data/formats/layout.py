"""Where the token ids lie inside a file: arrays by offset, type and shape, and their padding."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from refocused.system.errors import ShardError

FileKind = Literal["npy", "npz", "pt", "llm.c", "raw"]


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayPlace:
    """A C-ordered array of integers in a file.

    Attributes:
        member: Name of the zip member that holds it; None: the file itself.
        offset: Bytes before the first element, in the member or the file.
        dtype: Element type as stored.
        shape: `(n,)` or `(rows, columns)`.
    """

    member: str | None
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the elements."""
        return self.elements * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLayout:
    """How the tokens of one file are read.

    Attributes:
        kind: The file's form.
        ids: The token ids.
        lengths: `(rows,)`: real tokens of each row, on its left.
        mask: Same shape as `ids`: 1 where there is a token.
        pad_id: Id whose trailing run in each row is padding.
        separator_id: Id put between rows that hold tokens.
    """

    kind: FileKind
    ids: ArrayPlace
    lengths: ArrayPlace | None = None
    mask: ArrayPlace | None = None
    pad_id: int | None = None
    separator_id: int | None = None

    @property
    def padded(self) -> bool:
        """Whether rows may end in padding."""
        return bool(self.lengths or self.mask or self.pad_id is not None)

    @property
    def local_dtype(self) -> str:
        """Narrowest local element type that holds every id the stored type can hold."""
        return "uint16" if self.ids.dtype.itemsize <= 2 else "uint32"


def checked_place(
    *,
    what: str,
    member: str | None,
    offset: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    room: int,
) -> ArrayPlace:
    """Return an array's place when its type is integer and its shape fills the file.

    Args:
        what: The file, and the array in it, for messages.
        member: Name of the zip member that holds it; None: the file itself.
        offset: Bytes before the first element.
        dtype: Element type as stored.
        shape: Shape as the header says it; one trailing axis of size 1 of three is dropped.
        room: Bytes from the offset to the end of the member or the file.

    Raises:
        ShardError: The array is no integers, of another rank, empty, or not as long as its file.
    """
    if dtype.kind not in "iu":
        raise ShardError(
            f"{what}: the elements are {dtype}, but token ids are whole numbers. Write them as "
            "uint16 or int32, or put the file's name in data.exclude."
        )
    given = shape
    if len(shape) == 3 and shape[2] == 1:
        shape = shape[:2]
    if len(shape) not in (1, 2) or min(shape) < 0:
        raise ShardError(
            f"{what}: the shape is {given!s:.80}; token ids are (tokens,) or (rows, columns). "
            "Reshape them, or put the file's name in data.exclude."
        )
    place = ArrayPlace(member, offset, dtype, shape)
    if place.bytes != room:
        raise ShardError(
            f"{what}: the header says {given} of {dtype}, which is {place.bytes:,} bytes, but "
            f"{room:,} are there; the file is truncated or its header is wrong. Write it again, "
            "or put its name in data.exclude."
        )
    if not place.elements:
        raise ShardError(f"{what}: it holds no tokens. Put its name in data.exclude.")
    return place
