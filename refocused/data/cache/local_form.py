"""The one local form of tokens: a 1-D `.npy` of uint16 or uint32, read by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from refocused.config.data import DataConfig
from refocused.data.formats.object_reader import ByteSource
from refocused.data.formats.token_blocks import token_blocks
from refocused.data.formats.token_layout import (
    SMALL_VOCABULARY,
    TokenLayout,
    read_layout,
    vocabulary_for,
)
from refocused.data.manifest.shard_manifest import Shard
from refocused.system.errors import ShardError

HEADER_BYTES = 128  # of every .npy that numpy writes for one short shape


def local_dtype(shard: Shard, *, vocabulary: int) -> str:
    """Return the local element type: uint16 whenever the file or the vocabulary allows it."""
    return "uint16" if vocabulary <= SMALL_VOCABULARY else shard.dtype


def local_bytes(shard: Shard, *, vocabulary: int) -> int:
    """Return the bytes that a shard takes on disk in its local form."""
    dtype = np.dtype(local_dtype(shard, vocabulary=vocabulary))
    return HEADER_BYTES + shard.tokens * dtype.itemsize


def check_vocabulary(shard: Shard, max_id: int, *, vocabulary: int) -> None:
    """Raise `ShardError` if a shard's largest id has no embedding in the model."""
    if max_id >= vocabulary:
        raise ShardError(
            f"{shard.name}: its largest id is {max_id:,}, and the model's vocabulary ends at "
            f"{vocabulary - 1:,}. {vocabulary_for(max_id)}, or put {shard.file_names} in "
            "data.skip."
        )


def write_local_form(
    sources: Sequence[Path], target: Path, *, shard: Shard, data: DataConfig, vocabulary: int
) -> int:
    """Turn the downloaded `shard.files` into the local form; return its largest id.

    A lone file that has the form already is moved, not copied; otherwise `sources` stay. `target`
    may be left half written on an error. Raises `ShardError` if a file is refused or corrupt,
    differs from the manifest in its number of tokens or its reading, or holds an id outside the
    vocabulary.
    """
    dtype = np.dtype(local_dtype(shard, vocabulary=vocabulary)).newbyteorder("<")
    if len(sources) == 1:
        with sources[0].open("rb") as file:
            layout = _checked_layout(file, shard, data=data)
            ids = layout.ids
            if layout.kind == "npy" and len(ids.shape) == 1 and ids.dtype == dtype:
                max_id = _copy(file, layout, None, shard=shard, vocabulary=vocabulary)
                sources[0].replace(target)
                return max_id
    max_ids = [0]
    with target.open("wb") as out:
        np.lib.format.write_array_header_1_0(
            out, {"descr": dtype.str, "fortran_order": False, "shape": (shard.tokens,)}
        )
        for source, part in zip(sources, shard.files, strict=True):
            with source.open("rb") as file:
                layout = _checked_layout(file, part, data=data)
                found = _copy(file, layout, out, shard=part, vocabulary=vocabulary, dtype=dtype)
                max_ids.append(found)
    return max(max_ids)


def _checked_layout(file: ByteSource, shard: Shard, *, data: DataConfig) -> TokenLayout:
    layout = read_layout(file, name=shard.name, data=data)
    counted = (shard.pad_id, shard.separator_id)
    given = (layout.pad_id, layout.separator_id)
    if counted != given:  # a manifest of an earlier version, or of somebody else
        raise ShardError(
            f"{shard.name}: its rows are read with the padding and separator ids {given}, and the "
            f"manifest counted them with {counted}. Write the manifest again: "
            "refocused prepare_data manifest --write"
        )
    return layout


def _copy(
    file: ByteSource,
    layout: TokenLayout,
    out: BinaryIO | None,
    *,
    shard: Shard,
    vocabulary: int,
    dtype: np.dtype[np.generic] | None = None,
) -> int:
    """Write a file's ids, if there is an `out`; return the largest once all are checked."""
    tokens, max_id = 0, 0
    for block in token_blocks(file, layout, name=shard.name):
        tokens += len(block)
        if tokens > shard.tokens:  # more than the space that was checked
            break
        if block.size:
            max_id = max(max_id, int(block.max()))
        if out is not None:
            # An id too large for the type wraps here; it is refused below.
            out.write(block.astype(dtype, copy=False).data)
    if tokens != shard.tokens:
        raise ShardError(
            f"{shard.name}: {tokens:,} tokens are in it, and the manifest says "
            f"{shard.tokens:,}. Prepare the data again, or put its name in data.skip."
        )
    check_vocabulary(shard, max_id, vocabulary=vocabulary)
    return max_id
