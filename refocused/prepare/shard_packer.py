"""Cut a stream of ids into shards of one size, resumable after a kill at any moment."""

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
from refocused.data.manifest.shard_manifest import Shard
from refocused.tokenizers.encoders import Ids

HEADER_BYTES = 128  # of every .npy that numpy writes for one short shape


@dataclasses.dataclass(frozen=True, slots=True)
class Cursor:
    """How far a stream is packed."""

    source: int = 0  # number of the task, or the file, that is being packed
    offset: int = 0  # ids of it that are packed
    shard: int = 0  # number of the open shard
    filled: int = 0  # ids in the open shard
    crc32c: int = 0  # of these ids
    max_id: int = 0  # the largest of them
    documents: int = 0  # that begin among them


class ShardPacker:
    """Cuts one stream of ids into shards, and stores each when it is full.

    The open shard is a local file. It may be ahead of the last noted cursor, and the next start
    cuts it back; a shard that was stored but not noted is made and stored again, which the bucket
    accepts.
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
        note: Callable[[Cursor, Shard | None], None],
    ) -> None:
        """Open the shard at the cursor of an earlier start.

        Args:
            bucket: Where shards go.
            folder: Local folder of the open shard.
            name: Of the open shard's file, different for each stream of the folder.
            shard_name: Returns the object name of a shard by its number.
            shard_tokens: Ids of a full shard.
            dtype: Element type, little-endian.
            begin_id: Id that begins a document; None: documents are not known.
            cursor: Where to go on.
            note: Gets each new cursor and the shard that was finished; durable on return.
        """
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
                self.end_shard()

    def end_source(self) -> None:
        """Note that a source is packed whole.

        There is no fsync: the cursor's checksum finds what a power cut has lost.
        """
        with disk_errors(self._path):
            self._file.flush()
        self.cursor = dataclasses.replace(self.cursor, source=self.cursor.source + 1, offset=0)
        self._note(self.cursor, None)

    def end_shard(self) -> None:
        """Store the open shard as it is, unless it is empty."""
        done = self.cursor
        if not done.filled:
            return
        header = io.BytesIO()
        form = {"descr": self._dtype.str, "fortran_order": False, "shape": (done.filled,)}
        np.lib.format.write_array_header_1_0(header, form)
        with disk_errors(self._path):
            self._file.seek(0)
            self._file.write(header.getvalue())
            self._file.flush()
            os.fsync(self._file.fileno())
            size, checksum = self._path.stat().st_size, crc32c_of(self._path)
        shard = Shard(
            name=self._shard_name(done.shard),
            tokens=done.filled,
            dtype=self._dtype.name,
            size=size,
            crc32c=checksum,
            generation=None,
            max_id=done.max_id,
            documents=None if self._begin_id is None else done.documents,
        )
        self._bucket.upload(self._path, shard.name, crc32c=checksum)
        self.cursor = Cursor(done.source, done.offset, shard=done.shard + 1)
        self._note(self.cursor, shard)
        with disk_errors(self._path):
            self._file.close()
            self._file = self._reopened()

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

    def _reopened(self) -> BinaryIO:
        """Open the file of the open shard, cut to what the cursor knows."""
        if not self.cursor.filled:
            file = self._path.open("wb+")
            file.write(bytes(HEADER_BYTES))
            return file
        file = self._path.open("rb+")
        file.truncate(HEADER_BYTES + self.cursor.filled * self._dtype.itemsize)
        file.seek(0, os.SEEK_END)
        return file


def is_open_shard_whole(folder: Path, name: str, cursor: Cursor, *, dtype: np.dtype[Any]) -> bool:
    """Whether the open shard of an earlier start holds what a cursor knows of it."""
    if not cursor.filled:
        return True
    path = _open_path(folder, name)
    if not path.exists():
        return False
    left = cursor.filled * dtype.itemsize
    checksum = 0
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while left and (block := file.read(min(left, BLOCK_BYTES))):
            checksum = extended_crc32c(checksum, block)
            left -= len(block)
    return not left and checksum == cursor.crc32c


def _open_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.open"
