"""Which form a token file has, its element type, and where its ids and their padding lie."""

from __future__ import annotations

import dataclasses
import math
import os
import struct
import zipfile
from typing import Any, Literal

import numpy as np

from refocused.config.data import DataConfig
from refocused.data.formats.array_headers import NpyHeader, read_npy_header, read_tensor_header
from refocused.data.formats.object_names import TEXT_SUFFIXES, TOKEN_SUFFIXES, unusable
from refocused.data.formats.object_reader import ByteSource, checked_member, opened_zip
from refocused.system.errors import ShardError

SMALL_VOCABULARY = 1 << 16  # every id below it fits uint16
ID_KEYS = ("input_ids", "tokens", "arr_0", "sequences", "data")
LENGTHS_KEY = "sequence_lengths"
MASK_KEY = "attention_mask"
LLM_C_MAGIC = 20240520  # karpathy/llm.c, dev/data/data_common.py
LLM_C_HEADER_BYTES = 1024
LARGEST_PICKLE_BYTES = 1_000_000  # the pickle of a bare tensor has about 150


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayPlace:
    """A C-ordered array of integers in a file."""

    member: str | None  # name of the zip member that holds it; None: the file itself
    offset: int  # bytes before the first element, in the member or the file
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # (n,) or (rows, columns)

    @property
    def elements(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLayout:
    """How the tokens of one file are read."""

    kind: Literal["npy", "npz", "pt", "llm.c", "raw"]
    ids: ArrayPlace
    lengths: ArrayPlace | None = None  # (rows,): real tokens of each row, on its left
    mask: ArrayPlace | None = None  # 1 where there is a token
    pad_id: int | None = None  # id whose trailing run in each row is padding
    separator_id: int | None = None  # id put between rows that hold tokens

    @property
    def padded(self) -> bool:
        """Whether rows may end in padding."""
        return bool(self.lengths or self.mask or self.pad_id is not None)

    @property
    def local_dtype(self) -> str:
        """Narrowest local element type that holds every id the stored type can hold."""
        return "uint16" if self.ids.dtype.itemsize <= 2 else "uint32"


def element_type(vocabulary: int) -> np.dtype[Any]:
    """Return the element type of ids below `vocabulary`: little-endian uint16 or uint32."""
    return np.dtype("<u2" if vocabulary <= SMALL_VOCABULARY else "<u4")


def vocabulary_for(max_id: int) -> str:
    """Return what to do about ids that the model does not know."""
    return (
        "Set model.vocabulary to the size of the tokenizer that made the data, at least "
        f"{max_id + 1}"
    )


def refusal(name: str) -> str:
    """Say why a file of this name is never a token file, and what to do with it."""
    if name.endswith(TEXT_SUFFIXES):
        return (
            f"{name}: this is text, not tokens. Make tokens of it once with "
            "`refocused prepare_data tokenize`, and set data.source to what that writes."
        )
    if name.endswith((".bin", ".idx")):
        return (
            f"{name}: a .bin with an .idx beside it is Megatron's indexed form, which is not read. "
            "Convert it once with `refocused prepare_data convert`, or put its name in "
            "data.exclude."
        )
    return (
        f"{name}: token files end in {', '.join(TOKEN_SUFFIXES)}. Convert it, or leave it out of "
        "data.include."
    )


def read_layout(file: ByteSource, *, name: str, data: DataConfig) -> TokenLayout:
    """Read a token file's headers; the end of its name says the form.

    Of `data`, headerless files need `dtype`; `pad_id` and `separator_id` are for rows. Raises
    `ShardError` if the form is refused, a header lies, the ids are no whole numbers, or documents
    are to be masked and nothing would tell where a row ends.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if name.endswith(".npz"):
        layout = _npz_layout(file, name=name, data=data)
    elif name.endswith(".npy"):
        ids = _npy_place(read_npy_header(file, what=name), what=name, size=size)
        layout = TokenLayout("npy", ids, pad_id=data.pad_id)
    elif name.endswith(".pt"):
        layout = TokenLayout("pt", _tensor_place(file, name=name), pad_id=data.pad_id)
    elif name.endswith(".bin"):
        layout = _bin_layout(file, name=name, size=size, data=data)
    else:
        raise ShardError(refusal(name))
    if len(layout.ids.shape) == 1:  # whole rows and streams bring their own separators
        return dataclasses.replace(layout, pad_id=None)
    if not layout.padded:
        return layout
    if data.mask_documents and data.separator_id is None and layout.ids.shape[0] > 1:
        raise ShardError(
            f"{name}: its padded rows are documents, and with data.mask_documents nothing would "
            f"tell where one ends. Set data.separator_id={data.document_id}, which puts the id "
            "between rows, or data.mask_documents=false."
        )
    return dataclasses.replace(layout, separator_id=data.separator_id)


def _checked_place(place: ArrayPlace, *, what: str, room: int) -> ArrayPlace:
    """Check that an array's ids fill the room from its offset on; drop a third axis of size 1."""
    dtype, given = place.dtype, place.shape
    shape = given[:2] if len(given) == 3 and given[2] == 1 else given
    place = dataclasses.replace(place, shape=shape)
    if dtype.kind not in "iu":
        raise ShardError(
            f"{what}: the elements are {dtype}, but token ids are whole numbers. Write them as "
            "uint16 or int32, or put the file's name in data.exclude."
        )
    if len(shape) not in (1, 2) or min(shape) < 0:
        raise ShardError(
            f"{what}: the shape is {given!s:.80}; token ids are (tokens,) or (rows, columns). "
            "Reshape them, or put the file's name in data.exclude."
        )
    needed = place.elements * dtype.itemsize
    if needed != room:
        raise unusable(
            what,
            f"the header says {given} of {dtype}, which is {needed:,} bytes, but {room:,} are "
            "there; the file is truncated or its header is wrong",
        )
    if not place.elements:
        raise ShardError(f"{what}: it holds no tokens. Put its name in data.exclude.")
    return place


def _npy_place(header: NpyHeader, *, what: str, size: int, member: str | None = None) -> ArrayPlace:
    place = ArrayPlace(member, header.bytes, header.dtype, header.shape)
    return _checked_place(place, what=what, room=size - header.bytes)


def _npz_layout(file: ByteSource, *, name: str, data: DataConfig) -> TokenLayout:
    with opened_zip(file, name=name) as archive:
        members = archive.namelist()
        keys = [member.removesuffix(".npy") for member in members if member.endswith(".npy")]
        key = _ids_key(archive, keys, name=name)
        ids = _member_place(archive, key, name=name)
        lengths, mask = None, None
        if LENGTHS_KEY in keys:
            lengths = _member_place(archive, LENGTHS_KEY, name=name)
        elif MASK_KEY in keys:
            mask = _member_place(archive, MASK_KEY, name=name)
    if len(ids.shape) == 1 and (lengths or mask):  # one row alone
        ids = dataclasses.replace(ids, shape=(1, *ids.shape))
        mask = mask and dataclasses.replace(mask, shape=(1, *mask.shape))
    for place, its_key, shape in (
        (lengths, LENGTHS_KEY, ids.shape[:1]),
        (mask, MASK_KEY, ids.shape),
    ):
        if place is not None and place.shape != shape:
            problem = f"{its_key} has the shape {place.shape} for ids of {ids.shape}"
            raise unusable(name, problem)
    if len(ids.shape) == 2 and not (lengths or mask) and data.pad_id is None:
        raise ShardError(
            f"{name}: `{key}` holds rows of {ids.shape[1]} ids without {MASK_KEY} or "
            f"{LENGTHS_KEY}, so padding cannot be told from tokens. Set data.pad_id to the id that "
            "fills the rows (any id that ends no row, when they are full), or put the name in "
            "data.exclude."
        )
    pad_id = None if lengths or mask else data.pad_id
    return TokenLayout("npz", ids, lengths=lengths, mask=mask, pad_id=pad_id)


def _ids_key(archive: zipfile.ZipFile, keys: list[str], *, name: str) -> str:
    for key in ID_KEYS:
        if key in keys:
            return key
    kinds = {
        key: _member_header(archive, key, name=name).dtype
        for key in keys
        if key not in (LENGTHS_KEY, MASK_KEY)
    }
    whole = [key for key, dtype in kinds.items() if dtype.kind in "iu"]
    if len(whole) == 1:
        return whole[0]
    found = ", ".join(f"{key} ({dtype})" for key, dtype in kinds.items()) or "no array"
    raise ShardError(
        f"{name}: which array holds the token ids? It has {found}. Write the ids under one of "
        f"{', '.join(ID_KEYS)}, or put the file's name in data.exclude."
    )


def _member_header(archive: zipfile.ZipFile, key: str, *, name: str) -> NpyHeader:
    with archive.open(checked_member(archive, f"{key}.npy", name=name)) as content:
        return read_npy_header(content, what=f"{name}[{key}]")


def _member_place(archive: zipfile.ZipFile, key: str, *, name: str) -> ArrayPlace:
    header, member = _member_header(archive, key, name=name), f"{key}.npy"
    if key == MASK_KEY and header.dtype == np.bool_:
        header = dataclasses.replace(header, dtype=np.dtype("u1"))  # stored as the bytes 0 and 1
    size = archive.getinfo(member).file_size
    return _npy_place(header, what=f"{name}[{key}]", size=size, member=member)


def _tensor_place(file: ByteSource, *, name: str) -> ArrayPlace:
    with opened_zip(file, name=name) as archive:
        members = archive.namelist()
        pickles = [member for member in members if member.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ShardError(
                f"{name}: it holds no bare tensor as torch.save writes one. Save the ids alone: "
                "torch.save(ids, path), or put its name in data.exclude."
            )
        folder = pickles[0].removesuffix("data.pkl")
        byte_order = f"{folder}byteorder"
        big = byte_order in members and _content(archive, byte_order) == b"big"
        header = read_tensor_header(_content(archive, pickles[0]), what=name, big_endian=big)
        member = f"{folder}data/{header.storage}"
        if member not in members:
            raise unusable(name, f"its storage {member} is missing")
        stored = checked_member(archive, member, name=name).file_size
    offset = header.first * header.dtype.itemsize
    place = ArrayPlace(member, offset, header.dtype, header.shape)
    # A tensor may end before its storage does.
    room = min(place.elements * header.dtype.itemsize, stored - offset)
    return _checked_place(place, what=name, room=room)


def _content(archive: zipfile.ZipFile, member: str) -> bytes:
    with archive.open(member) as content:
        return content.read(LARGEST_PICKLE_BYTES)


def _bin_layout(file: ByteSource, *, name: str, size: int, data: DataConfig) -> TokenLayout:
    header = file.read(LLM_C_HEADER_BYTES)
    if len(header) == LLM_C_HEADER_BYTES:
        magic, version, tokens = struct.unpack("<3i", header[:12])
        if magic == LLM_C_MAGIC:
            if version != 1:
                problem = f"version {version} of the llm.c form; only version 1 (uint16) is read"
                raise unusable(name, problem)
            place = ArrayPlace(None, LLM_C_HEADER_BYTES, np.dtype("<u2"), (tokens,))
            ids = _checked_place(place, what=name, room=size - LLM_C_HEADER_BYTES)
            return TokenLayout("llm.c", ids)
    if data.dtype is None:
        raise ShardError(
            f"{name}: a headerless .bin cannot say how wide its ids are. Set data.dtype (uint16 "
            "for GPT-2's vocabulary)."
        )
    dtype = np.dtype(data.dtype).newbyteorder("<")
    place = ArrayPlace(None, 0, dtype, (max(size // dtype.itemsize, 1),))
    return TokenLayout("raw", _checked_place(place, what=name, room=size))
