"""The one local form of tokens: a 1-D `.npy` of uint16 or uint32 that can be mapped."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from refocused.config.data import DataConfig
from refocused.errors import ShardError
from refocused.shards.element_types import SMALL_VOCABULARY
from refocused.shards.formats import read_layout
from refocused.shards.layout import TokenLayout
from refocused.shards.manifest import Shard
from refocused.shards.token_blocks import token_blocks

HEADER_BYTES = 128  # of every .npy that numpy writes for one short shape


def local_dtype(shard: Shard, *, vocabulary: int) -> str:
    """Return the local element type: uint16 whenever the file or the vocabulary allows it."""
    return "uint16" if vocabulary <= SMALL_VOCABULARY else shard.dtype


def local_bytes(shard: Shard, *, vocabulary: int) -> int:
    """Return the bytes that a shard takes on disk in its local form."""
    return (
        HEADER_BYTES + shard.tokens * np.dtype(local_dtype(shard, vocabulary=vocabulary)).itemsize
    )


def check_vocabulary(shard: Shard, max_id: int, *, vocabulary: int) -> None:
    """Refuse a shard whose ids the model has no embedding for.

    Raises:
        ShardError: The largest id is not below `vocabulary`.
    """
    if max_id >= vocabulary:
        raise ShardError(
            f"{shard.name}: its largest id is {max_id:,}, and the model's vocabulary ends at "
            f"{vocabulary - 1:,}. Use a model with vocab_size above {max_id:,}, or put the file's "
            "name in data.exclude."
        )


def write_local_form(
    source: Path, target: Path, *, shard: Shard, data: DataConfig, vocabulary: int
) -> int:
    """Turn a downloaded file into the local form; return its largest id.

    A file that has the form already is moved, not copied; otherwise `source` stays. `target` may
    be left half written when this raises.

    Raises:
        ShardError: The file is refused or corrupt, has another number of tokens than the manifest
            says, or an id outside the vocabulary.
    """
    dtype = np.dtype(local_dtype(shard, vocabulary=vocabulary)).newbyteorder("<")
    with source.open("rb") as file:
        layout = read_layout(file, name=shard.name, data=data)
    if _is_local_form(layout, dtype):
        written, max_id = _measure(source, layout, name=shard.name)
    else:
        written, max_id = _convert(source, target, layout, shard=shard, dtype=dtype)
    if written != shard.tokens:
        raise ShardError(
            f"{shard.name}: {written:,} tokens are in it, and the manifest says {shard.tokens:,}. "
            "Prepare the data again, or put its name in data.exclude."
        )
    check_vocabulary(shard, max_id, vocabulary=vocabulary)
    if _is_local_form(layout, dtype):
        source.replace(target)
    return max_id


def _is_local_form(layout: TokenLayout, dtype: np.dtype[np.generic]) -> bool:
    return layout.kind == "npy" and len(layout.ids.shape) == 1 and layout.ids.dtype == dtype


def _measure(source: Path, layout: TokenLayout, *, name: str) -> tuple[int, int]:
    tokens, max_id = 0, 0
    with source.open("rb") as file:
        for block in token_blocks(file, layout, name=name):
            tokens += len(block)
            max_id = max(max_id, int(block.max()))
    return tokens, max_id


def _convert(
    source: Path, target: Path, layout: TokenLayout, *, shard: Shard, dtype: np.dtype[np.generic]
) -> tuple[int, int]:
    header = {"descr": dtype.str, "fortran_order": False, "shape": (shard.tokens,)}
    tokens, max_id = 0, 0
    with source.open("rb") as file, target.open("wb") as local:
        np.lib.format.write_array_header_1_0(local, header)
        for block in token_blocks(file, layout, name=shard.name):
            tokens += len(block)
            if tokens > shard.tokens:  # more than the space that was checked
                break
            if block.size:
                max_id = max(max_id, int(block.max()))
            # An id too large for the type wraps here; the caller refuses the file by `max_id`.
            local.write(block.astype(dtype, copy=False).data)
        local.flush()
        os.fsync(local.fileno())
    return tokens, max_id
