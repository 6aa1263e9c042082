"""The header of numpy's `.npy` form, read without trusting the lengths it claims."""

from __future__ import annotations

import dataclasses
import io
import threading
import tokenize
from typing import Any

import numpy as np

from refocused.data.formats.object_reader import ByteSource
from refocused.system.errors import ShardError

LARGEST_HEADER_BYTES = 10_000  # numpy's own limit for a header that is not trusted
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
# numpy parses with `ast`, which in CPython 3.11 counts its recursion for all threads together: two
# at once may raise SystemError (python/cpython#106905).
_PARSER = threading.Lock()
# What numpy raises of a header that is no dictionary of the three entries: TypeError of keys that
# are not all text, for it sorts them.
_MALFORMED = (
    ValueError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    RecursionError,
    MemoryError,
)


@dataclasses.dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a `.npy` header says.

    Attributes:
        dtype: Element type.
        shape: Shape, not yet compared with the file's length.
        bytes: Length of the header, magic included.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    bytes: int


class PickledArrayError(ShardError):
    """The array holds Python objects, which only `prepare_data convert --allow-pickle` reads."""


def read_npy_header(file: ByteSource, *, what: str) -> NpyHeader:
    """Read the header at the file's position.

    Raises:
        PickledArrayError: It holds pickled objects.
        ShardError: It is no `.npy`, or is in column order.
    """
    magic = file.read(8)
    length_bytes = _LENGTH_BYTES.get(magic[6], 0) if len(magic) == 8 else 0
    if magic[:6] != b"\x93NUMPY" or not length_bytes:
        raise ShardError(
            f"{what}: it starts with {magic!r}, which no .npy does. Write it again with "
            "numpy.save, or put its name in data.exclude."
        )
    stored_length = file.read(length_bytes)
    length = int.from_bytes(stored_length, "little")
    if length > LARGEST_HEADER_BYTES:
        raise ShardError(
            f"{what}: its .npy header claims {length:,} bytes, and no array of tokens needs over "
            f"{LARGEST_HEADER_BYTES:,}. Write it again, or put its name in data.exclude."
        )
    return _parsed(magic, stored_length + file.read(length), what=what)


def _parsed(magic: bytes, rest: bytes, *, what: str) -> NpyHeader:
    parse = (
        np.lib.format.read_array_header_1_0
        if magic[6] == 1
        else np.lib.format.read_array_header_2_0
    )
    try:
        with _PARSER:
            shape, column_order, dtype = parse(io.BytesIO(rest))
    except _MALFORMED as error:
        raise ShardError(
            f"{what}: its .npy header cannot be read ({error}). Write it again, or put its name "
            "in data.exclude."
        ) from None
    if dtype.hasobject:
        raise PickledArrayError(
            f"{what}: it holds Python objects, and pickled data can run code. Convert it once "
            "with `refocused prepare_data convert --allow-pickle`, if you trust where it is from."
        )
    if column_order and len(shape) > 1:
        raise ShardError(
            f"{what}: it is stored column by column. Write it again with "
            "numpy.save(path, numpy.ascontiguousarray(array))."
        )
    return NpyHeader(dtype, shape, len(magic) + len(rest))
