"""Which form a token file has, its element type, and where its ids lie."""

from __future__ import annotations

import dataclasses
import os
import struct
import zipfile
from typing import Any

import numpy as np

from refocused.config.data import DataConfig
from refocused.data.formats.array_headers import NpyHeader, read_npy_header, read_tensor_header
from refocused.data.formats.layout import ArrayPlace, TokenLayout, checked_place
from refocused.data.formats.object_names import TEXT_SUFFIXES, TOKEN_SUFFIXES
from refocused.data.formats.object_reader import ByteSource, checked_member, opened_zip
from refocused.system.errors import ShardError

SMALL_VOCABULARY = 1 << 16  # every id below it fits uint16


def element_type(vocabulary: int) -> np.dtype[Any]:
    """Return the element type of ids below `vocabulary`: little-endian uint16 or uint32."""
    return np.dtype("<u2" if vocabulary <= SMALL_VOCABULARY else "<u4")


def vocabulary_for(max_id: int) -> str:
    """Return what to do about ids that the model does not know."""
    return (
        "Set model.vocabulary to the size of the tokenizer that made the data, at least "
        f"{max_id + 1}"
    )


ID_KEYS = ("input_ids", "tokens", "arr_0", "sequences", "data")
LENGTHS_KEY = "sequence_lengths"
MASK_KEY = "attention_mask"

LLM_C_MAGIC = 20240520  # karpathy/llm.c, dev/data/data_common.py
LLM_C_HEADER_BYTES = 1024
LARGEST_PICKLE_BYTES = 1_000_000  # the pickle of a bare tensor has about 150


def read_layout(file: ByteSource, *, name: str, data: DataConfig) -> TokenLayout:
    """Read a token file's headers.

    Args:
        file: The open file, local or in a bucket.
        name: Object name: its end says the form, messages repeat it.
        data: `dtype` for headerless files; `pad_id` and `separator_id` for rows, which
            `mask_documents` needs.

    Raises:
        ShardError: The form is refused, a header lies, the ids are no whole numbers, or documents
            are to be masked and nothing would tell where a row ends.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if name.endswith(".npz"):
        layout = _npz_layout(file, name=name, data=data)
    elif name.endswith(".npy"):
        header = read_npy_header(file, what=name)
        ids = _npy_place(header, what=name, member=None, room=size - header.bytes)
        layout = TokenLayout("npy", ids, pad_id=data.pad_id)
    elif name.endswith(".pt"):
        layout = TokenLayout("pt", _tensor_place(file, name=name), pad_id=data.pad_id)
    elif name.endswith(".bin"):
        layout = _bin_layout(file, name=name, size=size, data=data)
    else:
        raise ShardError(refusal(name))
    return _with_separators(layout, data, name=name)


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


def _with_separators(layout: TokenLayout, data: DataConfig, *, name: str) -> TokenLayout:
    """Add the separator to padded rows: whole rows and streams bring their own."""
    if len(layout.ids.shape) == 1:
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


def _npy_place(header: NpyHeader, *, what: str, member: str | None, room: int) -> ArrayPlace:
    return checked_place(
        what=what,
        member=member,
        offset=header.bytes,
        dtype=header.dtype,
        shape=header.shape,
        room=room,
    )


def _npz_layout(file: ByteSource, *, name: str, data: DataConfig) -> TokenLayout:
    with opened_zip(file, name=name) as archive:
        headers = {
            member.removesuffix(".npy"): member
            for member in archive.namelist()
            if member.endswith(".npy")
        }
        key = _ids_key(archive, headers, name=name)
        ids = _member_place(archive, headers[key], name=name)
        lengths, mask = None, None
        if LENGTHS_KEY in headers:
            lengths = _member_place(archive, headers[LENGTHS_KEY], name=name)
        elif MASK_KEY in headers:
            mask = _member_place(archive, headers[MASK_KEY], name=name)
    if len(ids.shape) == 1 and (lengths or mask):  # one row alone
        ids = dataclasses.replace(ids, shape=(1, *ids.shape))
        mask = mask and dataclasses.replace(mask, shape=(1, *mask.shape))
    layout = TokenLayout("npz", ids, lengths=lengths, mask=mask)
    if not layout.padded:
        layout = dataclasses.replace(layout, pad_id=data.pad_id)
    _check_padding(layout, key=key, name=name)
    return layout


def _check_padding(layout: TokenLayout, *, key: str, name: str) -> None:
    shape = layout.ids.shape
    if layout.lengths and layout.lengths.shape != shape[:1]:
        raise ShardError(
            f"{name}: {LENGTHS_KEY} has the shape {layout.lengths.shape} for ids of {shape}. "
            "Write the file again, or put its name in data.exclude."
        )
    if layout.mask and layout.mask.shape != shape:
        raise ShardError(
            f"{name}: {MASK_KEY} has the shape {layout.mask.shape} for ids of {shape}. "
            "Write the file again, or put its name in data.exclude."
        )
    if len(shape) == 2 and not layout.padded:
        raise ShardError(
            f"{name}: `{key}` holds rows of {shape[1]} ids without {MASK_KEY} or {LENGTHS_KEY}, so "
            "padding cannot be told from tokens. Set data.pad_id to the id that fills the rows "
            "(any id that ends no row, when they are full), or put the name in data.exclude."
        )


def _ids_key(archive: zipfile.ZipFile, headers: dict[str, str], *, name: str) -> str:
    for key in ID_KEYS:
        if key in headers:
            return key
    kinds = {
        key: _member_header(archive, member, name=name).dtype
        for key, member in headers.items()
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


def _member_header(archive: zipfile.ZipFile, member: str, *, name: str) -> NpyHeader:
    with archive.open(checked_member(archive, member, name=name)) as content:
        return read_npy_header(content, what=f"{name}[{member.removesuffix('.npy')}]")


def _member_place(archive: zipfile.ZipFile, member: str, *, name: str) -> ArrayPlace:
    header = _member_header(archive, member, name=name)
    if member == f"{MASK_KEY}.npy" and header.dtype == np.bool_:
        header = dataclasses.replace(header, dtype=np.dtype("u1"))  # stored as the bytes 0 and 1
    room = archive.getinfo(member).file_size - header.bytes
    what = f"{name}[{member.removesuffix('.npy')}]"
    return _npy_place(header, what=what, member=member, room=room)


def _tensor_place(file: ByteSource, *, name: str) -> ArrayPlace:
    with opened_zip(file, name=name) as archive:
        pickles = [m for m in archive.namelist() if m.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ShardError(
                f"{name}: it holds no bare tensor as torch.save writes one. Save the ids alone: "
                "torch.save(ids, path), or put its name in data.exclude."
            )
        folder = pickles[0].removesuffix("data.pkl")
        byte_order = f"{folder}byteorder"
        big = byte_order in archive.namelist() and _content(archive, byte_order) == b"big"
        header = read_tensor_header(_content(archive, pickles[0]), what=name, big_endian=big)
        member = f"{folder}data/{header.storage}"
        if member not in archive.namelist():
            raise ShardError(
                f"{name}: its storage {member} is missing. Save it again with torch.save, or put "
                "its name in data.exclude."
            )
        stored = checked_member(archive, member, name=name).file_size
    offset = header.first * header.dtype.itemsize
    return checked_place(
        what=name,
        member=member,
        offset=offset,
        dtype=header.dtype,
        shape=header.shape,
        room=_room_of_view(header.shape, header.dtype.itemsize, stored - offset),
    )


def _content(archive: zipfile.ZipFile, member: str) -> bytes:
    with archive.open(member) as content:
        return content.read(LARGEST_PICKLE_BYTES)


def _room_of_view(shape: tuple[int, ...], itemsize: int, left: int) -> int:
    """Bytes of a tensor that may end before its storage does, or all that is left."""
    wanted = itemsize
    for length in shape:
        wanted *= length
    return min(wanted, left)


def _bin_layout(file: ByteSource, *, name: str, size: int, data: DataConfig) -> TokenLayout:
    header = file.read(LLM_C_HEADER_BYTES)
    if len(header) == LLM_C_HEADER_BYTES:
        magic, version, tokens = struct.unpack("<3i", header[:12])
        if magic == LLM_C_MAGIC:
            return _llm_c_layout(name=name, size=size, version=version, tokens=tokens)
    if data.dtype is None:
        raise ShardError(
            f"{name}: a headerless .bin cannot say how wide its ids are. Set data.dtype (uint16 "
            "for GPT-2's vocabulary)."
        )
    dtype = np.dtype(data.dtype).newbyteorder("<")
    shape = (max(size // dtype.itemsize, 1),)
    ids = checked_place(what=name, member=None, offset=0, dtype=dtype, shape=shape, room=size)
    return TokenLayout("raw", ids)


def _llm_c_layout(*, name: str, size: int, version: int, tokens: int) -> TokenLayout:
    if version != 1:
        raise ShardError(
            f"{name}: version {version} of the llm.c form; only version 1 (uint16) is read. "
            "Write it again, or put its name in data.exclude."
        )
    ids = checked_place(
        what=name,
        member=None,
        offset=LLM_C_HEADER_BYTES,
        dtype=np.dtype("<u2"),
        shape=(tokens,),
        room=size - LLM_C_HEADER_BYTES,
    )
    return TokenLayout("llm.c", ids)
