"""Files of a checkpoint: hashed, and sent to the disk, while they are written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import google_crc32c
import numpy as np
import torch
from torch.utils.serialization import config as serialization_config

from refocused.system.atomic_files import begin_write_back

BLOCK_BYTES = 512 * 1024  # hashed while it is still in the processor's cache
WRITE_BACK_BYTES = 32 * 1024 * 1024  # few enough calls to cost nothing, early enough to save time


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file as it went to the disk: its size in bytes and its CRC-32C."""

    path: Path
    size: int
    crc32c: int


class HashingWriter:
    """A file that computes the CRC-32C of what is written to it, and keeps its first failure.

    torch's zip writer reports a full disk as a failed assertion about positions; the operating
    system's own error is kept here instead and writing goes on into the void.

    The disk is kept busy meanwhile. The kernel would hold everything back until `flush` asks for
    it, and the two would take their times one after the other.
    """

    def __init__(self, file: IO[bytes]) -> None:
        """Wrap an open binary file that is empty."""
        self._file = file
        self._crc = 0
        self._sent = 0
        self.size = 0
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        """Write bytes or a buffer; return its length, also after a failure."""
        view = memoryview(content).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            self._write_block(view[start : start + BLOCK_BYTES])
        return len(view)

    def flush(self) -> None:
        """Hand all bytes to the disk, and wait for it."""
        if self.error is None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                self.error = error

    def _write_block(self, block: memoryview) -> None:
        self.size += len(block)
        if self.error is not None:
            return
        try:
            self._file.write(block)
        except OSError as error:
            self.error = error
            return
        # The hash function takes no memoryview; an array is another view of the same bytes.
        self._crc = google_crc32c.extend(self._crc, np.frombuffer(block, np.uint8))
        if self.size - self._sent >= WRITE_BACK_BYTES:
            begin_write_back(self._file.fileno(), self._sent, self.size - self._sent)
            self._sent = self.size

    @property
    def crc32c(self) -> int:
        """The CRC-32C of all bytes so far."""
        return int(self._crc)


@contextlib.contextmanager
def _hashing(path: Path) -> Iterator[HashingWriter]:
    """Open a new file; when the block ends it is on the disk, or its first failure is raised."""
    with path.open("xb") as file:
        writer = HashingWriter(file)
        yield writer
        writer.flush()
        if writer.error is not None:
            raise writer.error


def save_hashed(content: Any, path: Path) -> WrittenFile:
    """Write an object with torch.save to a new file.

    The zip archive gets no CRC-32 of its own, which costs three times as much as ours of the whole
    file, and which torch.load never looks at.

    Raises:
        OSError: The disk is full, read-only or failing.
    """
    with _hashing(path) as writer:
        without = serialization_config.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
        with without:  # in this thread
            torch.save(content, cast("IO[bytes]", writer))  # write and flush are all it uses
    return WrittenFile(path, writer.size, writer.crc32c)


def copy_hashed(source: Path, target: Path) -> WrittenFile:
    """Copy a file to a new one, in folders that are made for it.

    Raises:
        OSError: The disk is full, read-only or failing.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, _hashing(target) as writer:
        while writer.error is None and (block := read.read(BLOCK_BYTES)):
            writer.write(block)
    return WrittenFile(target, writer.size, writer.crc32c)
