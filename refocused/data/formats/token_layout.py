"""Headers of token files: format, element type, place of ids and padding, without pickles."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import pickle
import pickletools
import re
import struct
import threading
import tokenize
import zipfile
import zlib
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from refocused.config.data import DataConfig
from refocused.data.formats.object_names import TOKEN_SUFFIXES, text_kind, unusable
from refocused.data.formats.object_reader import ByteSource, checked_member, open_zip
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
class ArrayPlace:
    """A C-ordered array in a file."""

    member: str | None  # zip member that holds it; None: the file itself
    offset: int  # bytes before the first element, in the member or the file
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)


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


def read_tensor_header(
    pickled: bytes, *, what: str, big_endian: bool = False
) -> tuple[str, ArrayPlace]:
    """Read the `data.pkl` of a `.pt` file, without importing or calling what it names.

    Returns the name of the tensor's storage, and its place there, whose shape is not yet checked.
    Raises `ShardError` if the file holds anything but one row-major tensor of integers.
    """
    try:
        for operation, argument, _ in pickletools.genops(pickled):
            # The unpickler allocates its memo up to the largest index.
            far = operation.name == "LONG_BINPUT" and int(argument or 0) > len(pickled)
            if far or not _OPERATIONS.fullmatch(operation.name):
                raise ValueError(f"its pickle uses {operation.name}")
        value = _Symbols(io.BytesIO(pickled)).load()
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
    except (
        *(ValueError, LookupError, TypeError, AttributeError, RecursionError),
        *(EOFError, pickle.UnpicklingError),
    ) as error:
        raise ShardError(
            f"{what}: it is not a bare tensor of integers ({error!s:.200}). Save only the ids: "
            "torch.save(ids.contiguous().to(torch.int32), path), or put its name in data.exclude."
        ) from None
    dtype = np.dtype((">" if big_endian else "<") + _DTYPES[kind.name])
    return storage, ArrayPlace(None, first * dtype.itemsize, dtype, shape)


def read_npy_header(file: ByteSource | IO[bytes], *, what: str) -> ArrayPlace:
    """Read a `.npy` header at the file's position; the shape is not yet checked.

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
    return ArrayPlace(None, len(magic) + len(rest), dtype, shape)


SMALL_VOCABULARY = 1 << 16  # ids below it fit uint16
ID_KEYS = ("input_ids", "tokens", "arr_0", "sequences", "data")
LENGTHS_KEY = "sequence_lengths"
MASK_KEY = "attention_mask"
# Magic, version and type of karpathy/llm.c, dev/data/data_common.py: GPT-2, Llama 3.
LLM_C_TYPES = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
MIN_SUSPECT = 128  # ids, fewer of which prove nothing
MAX_HIGH_HALF = 3  # of an id below 262,144, the largest vocabularies
LLM_C_HEADER_BYTES = 1024
MAX_PICKLE_BYTES = 1_000_000  # a bare tensor's has about 150


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLayout:
    """How to read the tokens of one file."""

    kind: Literal["npy", "npz", "pt", "llm.c", "raw"]
    ids: ArrayPlace
    lengths: ArrayPlace | None = None  # (rows,): tokens of each row, from its left
    mask: ArrayPlace | None = None  # shape of ids: 1 for a token, 0 for padding
    pad_id: int | None = None  # id whose trailing run in each row is padding
    separator_id: int | None = None  # id inserted between rows that hold tokens

    @property
    def padded(self) -> bool:
        """Whether rows may end in padding."""
        return bool(self.lengths or self.mask or self.pad_id is not None)


def element_type(vocabulary: int) -> np.dtype[Any]:
    """Return the element type of ids below `vocabulary`: little-endian uint16 or uint32."""
    return np.dtype("<u2" if vocabulary <= SMALL_VOCABULARY else "<u4")


def vocabulary_advice(max_id: int) -> str:
    """Return what to do about ids beyond the model's vocabulary."""
    return (
        "Set model.vocabulary to the size of the tokenizer that made the data, at least "
        f"{max_id + 1}"
    )


def suspicion(ids: npt.NDArray[Any]) -> str | None:
    """Return why some ids at the start of a file are probably not tokens, with the remedy."""
    if len(ids) < MIN_SUSPECT:
        return None
    low, high = ids[: len(ids) // 2 * 2 : 2], ids[1::2]
    # Ids in the low halves vary, and the high ones are nearly constant.
    is_split = np.count_nonzero(high == 0) > len(high) // 4 and high.max() <= MAX_HIGH_HALF
    if is_split and low.max() > MAX_HIGH_HALF and len(np.unique(low)) > len(low) // 16:
        return (
            "every second id is 0 or almost, as where ids of twice the width were read as "
            f"{ids.dtype}. Set data.dtype (--dtype) to the type they were written with, such as "
            "uint32, or write the file again"
        )
    values, counts = np.unique(ids, return_counts=True)
    if counts.max() > len(ids) // 2:
        return (
            f"{counts.max() / len(ids):.0%} of its first {len(ids):,} ids are "
            f"{values[counts.argmax()]}. If it is padding, set data.pad_id (--pad-id), which needs "
            "rows; otherwise compare data.dtype (--dtype) with how the file was written"
        )
    return None


def why_unsupported(name: str) -> str:
    """Return why a file of this name cannot be a token file, and what to do with it."""
    if text_kind(name):
        return (
            f"{name}: this is text, not tokens. Tokenize it once with "
            "`refocused prepare_data tokenize`, and set data.source to its output."
        )
    if name.endswith((".bin", ".idx")):
        return (
            f"{name}: a .bin with an .idx beside it is in Megatron's indexed format, which is not "
            "supported. Convert it once with `refocused prepare_data convert`, or put its name in "
            "data.exclude."
        )
    return (
        f"{name}: token files end in {', '.join(TOKEN_SUFFIXES)}. Convert it, or leave it out of "
        "data.include."
    )


def read_layout(file: ByteSource, *, name: str, data: DataConfig) -> TokenLayout:
    """Read a token file's headers; the suffix of its name determines the format.

    From `data`, headerless files need `dtype`; `pad_id` and `separator_id` apply to rows. Raises
    `ShardError` if the format is not supported, a header is wrong, the ids are not integers, or
    `data.mask_documents` is set and nothing marks the ends of padded rows.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if name.endswith((".npy", ".bin")) and file.read(2) == b"\x1f\x8b":
        file.seek(0)
        with contextlib.suppress(zlib.error):  # ids may begin so, but do not go on as gzip does
            zlib.decompressobj(wbits=31).decompress(file.read(LLM_C_HEADER_BYTES))
            raise unusable(
                name,
                "it is compressed by gzip, perhaps by an upload with Content-Encoding: gzip. "
                "Unpack it (gunzip), and store it as it is",
            )
    file.seek(0)
    if name.endswith(".npz"):
        layout = _npz_layout(file, name=name, data=data)
    elif name.endswith(".npy"):
        ids = read_npy_header(file, what=name)
        ids = _checked_place(ids, what=name, room=size - ids.offset)
        layout = TokenLayout("npy", ids, pad_id=data.pad_id)
    elif name.endswith(".pt"):
        layout = TokenLayout("pt", _tensor_place(file, name=name), pad_id=data.pad_id)
    elif name.endswith(".bin"):
        layout = _bin_layout(file, name=name, size=size, data=data)
    else:
        raise ShardError(why_unsupported(name))
    if len(layout.ids.shape) == 1:  # streams contain their own separators
        return dataclasses.replace(layout, pad_id=None)
    if not layout.padded:
        return layout
    if data.mask_documents and data.separator_id is None and layout.ids.shape[0] > 1:
        raise ShardError(
            f"{name}: its padded rows are documents, but without separators data.mask_documents "
            f"cannot find their ends. Set data.separator_id={data.document_id}, which inserts the "
            "id between rows, or data.mask_documents=false."
        )
    return dataclasses.replace(layout, separator_id=data.separator_id)


def _checked_place(array: ArrayPlace, *, what: str, room: int) -> ArrayPlace:
    """Check an array's type, shape and size in bytes (`room`); drop a third axis of size 1."""
    dtype, given = array.dtype, array.shape
    shape = given[:2] if len(given) == 3 and given[2] == 1 else given
    array = dataclasses.replace(array, shape=shape)
    if dtype.kind not in "iu":
        raise ShardError(
            f"{what}: the elements are {dtype}, but token ids are integers. Write them as "
            "uint16 or int32, or put the file's name in data.exclude."
        )
    if len(shape) not in (1, 2) or min(shape) < 0:
        raise ShardError(
            f"{what}: the shape is {given!s:.80}; token ids are (tokens,) or (rows, columns). "
            "Reshape them, or put the file's name in data.exclude."
        )
    needed = array.elements * dtype.itemsize
    if needed != room:
        raise unusable(
            what,
            f"the header says {given} of {dtype}, which is {needed:,} bytes, but the file has "
            f"{room:,}; it is truncated or its header is wrong",
        )
    if not array.elements:
        raise ShardError(f"{what}: it holds no tokens. Put its name in data.exclude.")
    return array


def _npz_layout(file: ByteSource, *, name: str, data: DataConfig) -> TokenLayout:
    def header(key: str) -> ArrayPlace:
        with archive.open(checked_member(archive, f"{key}.npy", name=name)) as content:
            array = read_npy_header(content, what=f"{name}[{key}]")
        return dataclasses.replace(array, member=f"{key}.npy")

    def checked(key: str) -> ArrayPlace | None:
        if key not in keys:
            return None
        array = header(key)
        if key == MASK_KEY and array.dtype == np.bool_:
            array = dataclasses.replace(array, dtype=np.dtype("u1"))  # stored as bytes 0 and 1
        room = archive.getinfo(f"{key}.npy").file_size - array.offset
        return _checked_place(array, what=f"{name}[{key}]", room=room)

    with open_zip(file, name=name) as archive:
        members = archive.namelist()
        keys = [member.removesuffix(".npy") for member in members if member.endswith(".npy")]
        named = [key for key in ID_KEYS if key in keys][:1]
        if not named:
            kinds = {key: header(key).dtype for key in keys if key not in (LENGTHS_KEY, MASK_KEY)}
            named = [key for key, dtype in kinds.items() if dtype.kind in "iu"]
            if len(named) != 1:
                arrays = ", ".join(f"{key} ({dtype})" for key, dtype in kinds.items()) or "none"
                raise ShardError(
                    f"{name}: it is unclear which array holds the token ids ({arrays}). Name the "
                    f"array of ids one of {', '.join(ID_KEYS)}, or put the file's name in "
                    "data.exclude."
                )
        ids, lengths = checked(named[0]), checked(LENGTHS_KEY)
        mask = None if lengths else checked(MASK_KEY)
        assert ids is not None  # its key is there
    if len(ids.shape) == 1 and (lengths or mask):  # a single row
        ids = dataclasses.replace(ids, shape=(1, *ids.shape))
        mask = mask and dataclasses.replace(mask, shape=(1, *mask.shape))
    for array, key, shape in ((lengths, LENGTHS_KEY, ids.shape[:1]), (mask, MASK_KEY, ids.shape)):
        if array is not None and array.shape != shape:
            problem = f"{key} has the shape {array.shape}, but the ids have {ids.shape}"
            raise unusable(name, problem)
    if len(ids.shape) == 2 and not (lengths or mask) and data.pad_id is None:
        raise ShardError(
            f"{name}: `{named[0]}` holds rows of {ids.shape[1]} ids without {MASK_KEY} or "
            f"{LENGTHS_KEY}, so padding and tokens cannot be distinguished. Set data.pad_id to the "
            "id that fills the rows (if all rows are full: any id that no row ends with), or put "
            "the name in data.exclude."
        )
    pad_id = None if lengths or mask else data.pad_id
    return TokenLayout("npz", ids, lengths=lengths, mask=mask, pad_id=pad_id)


def _tensor_place(file: ByteSource, *, name: str) -> ArrayPlace:
    with open_zip(file, name=name) as archive:
        members = archive.namelist()
        pickles = [member for member in members if member.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ShardError(
                f"{name}: it is not a tensor saved by torch.save. Save only the ids: "
                "torch.save(ids, path), or put its name in data.exclude."
            )
        folder = pickles[0].removesuffix("data.pkl")
        byte_order = f"{folder}byteorder"
        big = byte_order in members and _content(archive, byte_order) == b"big"
        storage, array = read_tensor_header(
            _content(archive, pickles[0]), what=name, big_endian=big
        )
        member = f"{folder}data/{storage}"
        if member not in members:
            raise unusable(name, f"its storage {member} is missing")
        stored = checked_member(archive, member, name=name).file_size
    # A tensor may be a part of its storage.
    room = min(array.elements * array.dtype.itemsize, stored - array.offset)
    return _checked_place(dataclasses.replace(array, member=member), what=name, room=room)


def _content(archive: zipfile.ZipFile, member: str) -> bytes:
    with archive.open(member) as content:
        return content.read(MAX_PICKLE_BYTES)


def _bin_layout(file: ByteSource, *, name: str, size: int, data: DataConfig) -> TokenLayout:
    header = file.read(LLM_C_HEADER_BYTES)
    if len(header) == LLM_C_HEADER_BYTES:
        magic, version, tokens = struct.unpack("<3i", header[:12])
        if magic in LLM_C_TYPES:
            known, kind = LLM_C_TYPES[magic]
            if version != known:
                problem = f"it has version {version} of llm.c's format {magic}; only {known} is"
                raise unusable(name, f"{problem} read")
            array = ArrayPlace(None, LLM_C_HEADER_BYTES, np.dtype(kind), (tokens,))
            ids = _checked_place(array, what=name, room=size - LLM_C_HEADER_BYTES)
            return TokenLayout("llm.c", ids)
    if data.dtype is None:
        raise ShardError(
            f"{name}: a .bin without a header does not give its element type. Set data.dtype "
            "(uint16 for GPT-2's vocabulary)."
        )
    dtype = np.dtype(data.dtype).newbyteorder("<")
    first = np.frombuffer(header[: len(header) // dtype.itemsize * dtype.itemsize], dtype)
    if "every second id" in (doubt := suspicion(first) or ""):
        raise unusable(name, doubt)
    array = ArrayPlace(None, 0, dtype, (max(size // dtype.itemsize, 1),))
    return TokenLayout("raw", _checked_place(array, what=name, room=size))
