"""A stream of ids cut into shards of one size, so that it can go on after a kill at any moment."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from refocused.bucket.bucket import BLOCK_BYTES, Bucket, crc32c_of, extended_crc32c
from refocused.bucket.partial_files import disk_errors
from refocused.tokenizers.encoders import Ids

HEADER_BYTES = 128  # of every .npy that numpy writes for one short shape


@dataclasses.dataclass(frozen=True, slots=True)
class ShardRow:
    """A finished shard, as a manifest lists it.

    Attributes:
        name: Object name.
        tokens: Ids in it.
        size: Bytes.
        crc32c: Checksum of the object.
        max_id: Largest id.
        documents: Documents that begin in it; None: nobody knows.
    """

    name: str
    tokens: int
    size: int
    crc32c: int
    max_id: int
    documents: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Cursor:
    """How far a stream is packed.

    Attributes:
        source: Number of the source (a task, or a file) that is being packed.
        offset: Ids of it that are packed.
        shard: Number of the open shard.
        filled: Ids in the open shard.
        crc32c: Checksum of the open shard's ids.
        max_id: Largest of them.
        documents: Documents that begin among them.
    """

    source: int = 0
    offset: int = 0
    shard: int = 0
    filled: int = 0
    crc32c: int = 0
    max_id: int = 0
    documents: int = 0


class ShardPacker:
    """Cuts one stream of ids into shards, and stores each when it is full.

    The open shard is a local file. It may be ahead of the cursor that was noted last, and is cut
    back to it on the next start; a shard that was stored but not noted is made and stored again,
    which the bucket takes for done.

    Args:
        bucket: Where shards go.
        folder: Local folder of the open shard.
        name: Of the open shard's file, different for each stream of the folder.
        shard_name: Returns the object name of a shard by its number.
        shard_tokens: Ids of a full shard.
        dtype: Element type, little-endian.
        begin_id: Id that begins a document; None: documents are not known.
        cursor: How far an earlier start was.
        note: Told each new cursor, with the row of a shard that was finished; durable on return.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        folder: Path,
        name: str,
        shard_name: Callable[[int], str],
        shard_tokens: int,
        dtype: np.dtype[Any],
        begin_id: int | None,
        cursor: Cursor,
        note: Callable[[Cursor, ShardRow | None], None],
    ) -> None:
        self.cursor = cursor
        self._bucket = bucket
        self._shard_name = shard_name
        self._shard_tokens = shard_tokens
        self._dtype = dtype
        self._begin_id = begin_id
        self._note = note
        self._path = _open_path(folder, name)
        with disk_errors(self._path):
            self._file = self._reopened()

    def add(self, ids: Ids) -> None:
        """Append ids of the source at the cursor.

        Raises:
            BucketError: The disk is full, or the bucket does not take a full shard.
        """
        start = 0
        while start < len(ids):
            room = self._shard_tokens - self.cursor.filled
            self._append(ids[start : start + room])
            start += room
            if self.cursor.filled == self._shard_tokens:
                self._finish()

    def end_source(self) -> None:
        """Note that a source is packed whole.

        Nothing waits for the disk here: what a power cut takes is found by the cursor's checksum.
        """
        with disk_errors(self._path):
            self._file.flush()
        self.cursor = dataclasses.replace(self.cursor, source=self.cursor.source + 1, offset=0)
        self._note(self.cursor, None)

    def end_shard(self) -> None:
        """Store the open shard as it is, unless it is empty."""
        if self.cursor.filled:
            self._finish()

    def close(self) -> None:
        """Close the open shard's file; it stays for the next start."""
        self._file.close()

    def _append(self, ids: Ids) -> None:
        content = ids.astype(self._dtype, copy=False).tobytes()
        with disk_errors(self._path, needed_bytes=len(content)):
            self._file.write(content)
        before = self.cursor
        begins = 0 if self._begin_id is None else int(np.count_nonzero(ids == self._begin_id))
        self.cursor = dataclasses.replace(
            before,
            offset=before.offset + len(ids),
            filled=before.filled + len(ids),
            crc32c=extended_crc32c(before.crc32c, content),
            max_id=max(before.max_id, int(ids.max())),
            documents=before.documents + begins,
        )

    def _finish(self) -> None:
        finished = self.cursor
        with disk_errors(self._path):
            self._file.seek(0)
            self._file.write(_header(finished.filled, self._dtype))
            self._file.flush()
            os.fsync(self._file.fileno())
            size, checksum = self._path.stat().st_size, crc32c_of(self._path)
        row = ShardRow(
            name=self._shard_name(finished.shard),
            tokens=finished.filled,
            size=size,
            crc32c=checksum,
            max_id=finished.max_id,
            documents=None if self._begin_id is None else finished.documents,
        )
        self._bucket.upload(self._path, row.name, crc32c=row.crc32c)
        self.cursor = Cursor(finished.source, finished.offset, shard=finished.shard + 1)
        self._note(self.cursor, row)
        with disk_errors(self._path):
            self._file.close()
            self._file = self._reopened()

    def _reopened(self) -> BinaryIO:
        """Open the file of the open shard, cut to what the cursor knows."""
        if not self.cursor.filled:
            file = self._path.open("wb+")
            file.write(bytes(HEADER_BYTES))
            return file
        file = self._path.open("rb+")
        file.truncate(_open_bytes(self.cursor, self._dtype))
        file.seek(0, os.SEEK_END)
        return file


def is_open_shard_whole(folder: Path, name: str, cursor: Cursor, *, dtype: np.dtype[Any]) -> bool:
    """Whether the open shard of an earlier start holds what a cursor knows of it."""
    if not cursor.filled:
        return True
    path = _open_path(folder, name)
    if not path.exists():
        return False
    left = _open_bytes(cursor, dtype) - HEADER_BYTES
    checksum = 0
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while left and (block := file.read(min(left, BLOCK_BYTES))):
            checksum = extended_crc32c(checksum, block)
            left -= len(block)
    return not left and checksum == cursor.crc32c


def _open_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.open"


def _open_bytes(cursor: Cursor, dtype: np.dtype[Any]) -> int:
    return HEADER_BYTES + cursor.filled * dtype.itemsize


def _header(tokens: int, dtype: np.dtype[Any]) -> bytes:
    file = io.BytesIO()
    header = {"descr": dtype.str, "fortran_order": False, "shape": (tokens,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()
