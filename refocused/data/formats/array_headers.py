"""Read headers of `.npy` and `.pt` arrays, without trusting them or running their pickles."""

from __future__ import annotations

import dataclasses
import io
import pickle
import pickletools
import re
import threading
import tokenize
from typing import IO, Any

import numpy as np

from refocused.data.formats.object_names import unusable
from refocused.data.formats.object_reader import ByteSource
from refocused.system.errors import ShardError

_DTYPES = {f"torch {np.dtype(kind)}": kind for kind in ("u1", "i1", "i2", "u2", "i4", "u4", "i8")}
_STORAGES = {"Byte": "u1", "Char": "i1", "Short": "i2", "Int": "i4", "Long": "i8"}
_DTYPES |= {f"torch {name}Storage": kind for name, kind in _STORAGES.items()}
_REBUILD = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
# The opcodes of a tensor saved by torch.save. None creates a value larger than the pickle.
_OPERATIONS = re.compile(
    "PROTO|STOP|GLOBAL|REDUCE|BINPERSID|(LONG_)?BIN(PUT|GET)|MARK|EMPTY_TUPLE|TUPLE[123]?"
    "|NEWTRUE|NEWFALSE|BININT[12]?|LONG1|(SHORT_)?BINUNICODE"
)
MAX_HEADER_BYTES = 10_000  # numpy's limit for untrusted headers
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
# numpy parses with `ast`, whose recursion counter is shared by all threads in CPython 3.11:
# concurrent calls may raise SystemError (python/cpython#106905).
_PARSER = threading.Lock()
# Raised by numpy's parser; a TypeError comes from sorting keys that are not all text.
_MALFORMED = (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorHeader:
    """A row-major tensor in a `.pt` file; its shape is not yet checked against the storage."""

    storage: str  # the zip member is `<folder>/data/<storage>`
    dtype: np.dtype[Any]  # in the byte order of the file
    shape: tuple[int, ...]
    first: int  # elements of the storage before the tensor's first


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class _Symbol:
    """A global name in a pickle and its arguments; nothing is imported or called."""

    name: str
    arguments: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> _Symbol:
        return _Symbol(self.name, arguments)


class _Symbols(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> _Symbol:
        return _Symbol(f"{module} {name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_tensor_header(pickled: bytes, *, what: str, big_endian: bool = False) -> TensorHeader:
    """Read the `data.pkl` of a `.pt` file, without importing or calling what it names.

    Raises `ShardError` if it holds anything but one row-major tensor of integers.
    """
    try:
        for operation, argument, _ in pickletools.genops(pickled):
            # The unpickler allocates its memo up to the largest index.
            far = operation.name == "LONG_BINPUT" and int(argument or 0) > len(pickled)
            if far or not _OPERATIONS.fullmatch(operation.name):
                raise ValueError(f"its pickle uses {operation.name}")
        return _tensor(_Symbols(io.BytesIO(pickled)).load(), big_endian=big_endian)
    except (
        *(ValueError, LookupError, TypeError, AttributeError, RecursionError),
        *(EOFError, pickle.UnpicklingError),
    ) as error:
        raise ShardError(
            f"{what}: it is not a bare tensor of integers ({error!s:.200}). Save only the ids: "
            "torch.save(ids.contiguous().to(torch.int32), path), or put its name in data.exclude."
        ) from None


def _tensor(value: Any, *, big_endian: bool) -> TensorHeader:
    if not isinstance(value, _Symbol) or value.name not in _REBUILD:
        raise ValueError("its top-level object is not a tensor")
    (_, kind, storage, *_), first, shape, strides, *others = value.arguments
    if value.name == _REBUILD[1]:
        kind = others[2]
    if not isinstance(kind, _Symbol) or kind.name not in _DTYPES:
        raise ValueError("its elements are not integers")
    if not isinstance(storage, str):
        raise ValueError("the tensor has no storage")
    if not all(type(number) is int and number >= 0 for number in (first, *shape, *strides)):
        raise ValueError("its offset, shape or strides are not non-negative integers")
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            raise ValueError(f"shape {shape} with strides {strides} is not row-major")
        expected *= length
    dtype = np.dtype((">" if big_endian else "<") + _DTYPES[kind.name])
    return TensorHeader(storage, dtype, shape, first)


@dataclasses.dataclass(frozen=True, slots=True)
class NpyHeader:
    """A `.npy` header; its shape is not yet checked against the file's length."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    bytes: int  # of the header, magic included


def read_npy_header(file: ByteSource | IO[bytes], *, what: str) -> NpyHeader:
    """Read a `.npy` header at the file's position.

    Raises `ShardError` if it is not a `.npy` in row order, or holds pickled objects.
    """
    magic = file.read(8)
    length_bytes = _LENGTH_BYTES.get(magic[6], 0) if len(magic) == 8 else 0
    if magic[:6] != b"\x93NUMPY" or not length_bytes:
        raise unusable(what, f"it starts with {magic!r}, which is not that of a .npy file")
    stored_length = file.read(length_bytes)
    length = int.from_bytes(stored_length, "little")
    if length > MAX_HEADER_BYTES:
        raise unusable(
            what,
            f"its .npy header claims {length:,} bytes; at most {MAX_HEADER_BYTES:,} are supported",
        )
    rest = stored_length + file.read(length)
    formats = np.lib.format
    parse = formats.read_array_header_1_0 if magic[6] == 1 else formats.read_array_header_2_0
    try:
        with _PARSER:
            shape, column_order, dtype = parse(io.BytesIO(rest))
    except _MALFORMED as error:
        raise unusable(what, f"its .npy header cannot be read ({error})") from None
    if dtype.hasobject:
        raise ShardError(
            f"{what}: it holds Python objects. Pickled arrays are not supported, because they can "
            "run code. Where you trust them, write their ids with numpy.save as an integer array."
        )
    if column_order and len(shape) > 1:
        raise ShardError(
            f"{what}: it is stored in column order. Write it again with "
            "numpy.save(path, numpy.ascontiguousarray(array))."
        )
    return NpyHeader(dtype, shape, len(magic) + len(rest))
