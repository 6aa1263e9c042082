"""Headers of `.npy` and `.pt` arrays, read without trusting the lengths they claim."""

from __future__ import annotations

import dataclasses
import io
import pickletools
import threading
import tokenize
from typing import Any

import numpy as np

from refocused.data.formats.object_reader import ByteSource
from refocused.system.errors import ShardError

_STORAGES = {
    "torch ByteStorage": "u1",
    "torch CharStorage": "i1",
    "torch ShortStorage": "i2",
    "torch IntStorage": "i4",
    "torch LongStorage": "i8",
}
_DTYPES = {
    "torch uint8": "u1",
    "torch int8": "i1",
    "torch int16": "i2",
    "torch uint16": "u2",
    "torch int32": "i4",
    "torch uint32": "u4",
    "torch int64": "i8",
}
_REBUILD = ("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
_CONSTANTS = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE")
_MARK = object()


@dataclasses.dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Storage:
    kind: str
    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    function: object
    arguments: object


@dataclasses.dataclass(frozen=True, slots=True)
class TensorHeader:
    """A row-major tensor inside a `.pt` file.

    Attributes:
        storage: Name of its storage: the zip member `<folder>/data/<storage>`.
        dtype: Element type, in the byte order of the file.
        shape: Shape, not yet compared with the storage's length.
        first: Elements of the storage before the tensor's first.
    """

    storage: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    first: int


def read_tensor_header(pickled: bytes, *, what: str, big_endian: bool = False) -> TensorHeader:
    """Read the `data.pkl` of a `.pt` file that holds one tensor and nothing else.

    The pickle's operations are followed on symbols; nothing in it is ever called or imported.

    Raises:
        ShardError: It holds anything but one row-major tensor of integers.
    """
    try:
        return _tensor(_followed(pickled), big_endian=big_endian)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ShardError(
            f"{what}: it is no bare tensor of whole numbers ({error!s:.200}). Save the ids alone: "
            "torch.save(ids.contiguous().to(torch.int32), path), or put its name in data.exclude."
        ) from None


def _tensor(value: object, *, big_endian: bool) -> TensorHeader:
    if not (isinstance(value, _Call) and isinstance(value.function, _Global)):
        raise ValueError("its top is not a tensor")
    if value.function.name not in _REBUILD or not isinstance(value.arguments, tuple):
        raise ValueError(f"it calls {value.function.name}")
    storage, first, shape, strides = value.arguments[:4]
    if not isinstance(storage, _Storage):
        raise ValueError("the tensor has no storage")
    kind, kinds = storage.kind, _STORAGES
    if value.function.name == _REBUILD[1]:
        kind, kinds = value.arguments[6].name, _DTYPES
    if kind not in kinds:
        raise ValueError(f"its elements are {kind}")
    if not all(isinstance(n, int) and n >= 0 for n in (first, *shape, *strides)):
        raise ValueError(f"offset {first}, shape {shape}, strides {strides}")
    _check_row_major(shape, strides)
    dtype = np.dtype((">" if big_endian else "<") + kinds[kind])
    return TensorHeader(storage.key, dtype, shape, first)


def _check_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            raise ValueError(f"shape {shape} with strides {strides} is not row after row")
        expected *= length


def _followed(pickled: bytes) -> object:
    """Follow the few operations that torch.save uses for a tensor; refuse all others."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for operation, argument, _ in pickletools.genops(pickled):
        name = operation.name
        if name == "STOP":
            return stack.pop()
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name != "PROTO":
            _apply(name, argument, stack)
    raise ValueError("its pickle has no end")


def _apply(name: str, argument: Any, stack: list[Any]) -> None:
    if name in _CONSTANTS:
        stack.append(argument)
    elif name in ("NEWTRUE", "NEWFALSE"):
        stack.append(name == "NEWTRUE")
    elif name == "GLOBAL":
        stack.append(_Global(argument))
    elif name == "MARK":
        stack.append(_MARK)
    elif name == "EMPTY_TUPLE":
        stack.append(())
    elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
        _pop_tuple(name, stack)
    elif name == "BINPERSID":
        _, kind, key, _, _ = stack.pop()
        stack.append(_Storage(kind.name, key))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(_Call(stack.pop(), arguments))
    else:
        raise ValueError(f"its pickle uses {name}")


def _pop_tuple(name: str, stack: list[Any]) -> None:
    if name == "TUPLE":
        start = len(stack) - 1
        while stack[start] is not _MARK:  # past the first, an IndexError
            start -= 1
        items = tuple(stack[start + 1 :])
    else:
        start = len(stack) - int(name[-1])
        items = tuple(stack[start:])
    del stack[start:]
    stack.append(items)


LARGEST_HEADER_BYTES = 10_000  # numpy's own limit for a header that is not trusted
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
# numpy parses with `ast`, which in CPython 3.11 counts its recursion for all threads together: two
# at once may raise SystemError (python/cpython#106905).
_PARSER = threading.Lock()
# What numpy raises of a header that is no dictionary of the three entries: TypeError of keys that
# are not all text, for it sorts them.
_MALFORMED = (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError)


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
