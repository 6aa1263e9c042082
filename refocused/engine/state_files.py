"""Write and read a checkpoint's tensor files, without DeepSpeed.

They are hashed, and their write-back begins, while they are written. Only tensors and plain values
are read.
"""

import contextlib
import dataclasses
import errno
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import google_crc32c
import numpy as np
import torch
from torch.utils.serialization import config as serialization_config

from refocused.system.atomic_files import start_write_back
from refocused.system.errors import CheckpointUnavailableError, CorruptCheckpointError, as_typed

BLOCK_BYTES = 512 * 1024  # hashed while it is in the processor's cache
WRITE_BACK_BYTES = 32 * 1024 * 1024  # start the write-back this often


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file on disk, its size in bytes and its CRC-32C."""

    path: Path
    size: int
    crc32c: int


class HashingWriter:
    """Wraps an empty binary file; computes the CRC-32C of its content and keeps its first error.

    After an error, writes are discarded: torch's zip writer would otherwise hide the system's
    error, such as a full disk, behind a failed assertion. Write-back to the disk starts during the
    writes, so that it overlaps with them instead of beginning at `flush`.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._sent = 0
        self.crc32c = self.size = 0  # of all bytes so far
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        """Write bytes or a buffer; return its length, even after an error."""
        view = memoryview(content).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            self.size += len(block)
            if self.error is not None:
                continue
            try:
                self._file.write(block)
            except OSError as error:
                self.error = error
                continue
            # The hash function takes no memoryview, but an array without a copy.
            self.crc32c = google_crc32c.extend(self.crc32c, np.frombuffer(block, np.uint8))
            if self.size - self._sent >= WRITE_BACK_BYTES:
                start_write_back(self._file.fileno(), self._sent, self.size - self._sent)
                self._sent = self.size
        return len(view)

    def flush(self) -> None:
        """Flush all bytes to the disk."""
        if self.error is None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                self.error = error


@contextlib.contextmanager
def _hashing(path: Path) -> Iterator[HashingWriter]:
    """Open a new file; on exit flush it to the disk, or raise its first error."""
    with path.open("xb") as file:
        writer = HashingWriter(file)
        yield writer
        writer.flush()
        if writer.error is not None:
            raise writer.error


def save_hashed(content: Any, path: Path) -> WrittenFile:
    """Write an object to a new file with torch.save; raises OSError.

    Omits the zip archive's own CRC-32, which costs three times as much as the CRC-32C and is never
    read by torch.load.
    """
    with _hashing(path) as writer:
        without = serialization_config.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
        with without:  # in this thread
            torch.save(content, cast("IO[bytes]", writer))  # it calls only write and flush
    return WrittenFile(path, writer.size, writer.crc32c)


def copy_hashed(source: Path, target: Path) -> WrittenFile:
    """Copy a file to a new one; create its folder. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as read, _hashing(target) as writer:
        while writer.error is None and (block := read.read(BLOCK_BYTES)):
            writer.write(block)
    return WrittenFile(target, writer.size, writer.crc32c)


class UnreadableFileError(CorruptCheckpointError):
    """The content of a file cannot be loaded, even if its checksum is right."""


def read_state(path: Path, *, map_location: Any = "cpu", mapped: bool = False) -> Any:
    """Read a file of tensors and plain values that `torch.save` wrote.

    If `mapped`, the tensors are memory-mapped instead of read.

    Raises:
        UnreadableFileError: It is truncated, contains other objects, or is not such a file.
        CheckpointUnavailableError: The operating system cannot read it at the moment.
    """
    try:
        _require_stored(path)
        content = torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
        _require_own_elements(content)
        return content
    except OSError as error:
        if error.errno == errno.EIO:
            raise UnreadableFileError(f"{path} cannot be read: {error.strerror}.") from error
        raise _failed(path, error.strerror or str(error)) from error
    except Exception as error:  # a corrupt pickle may raise anything
        reason = _reason(error)
        if reason.startswith("unable to mmap"):
            raise _failed(path, reason) from error
        raise UnreadableFileError(
            f"{path} cannot be loaded: {reason:.200}. Use the version of refocused that wrote the "
            f"checkpoint, or choose another: {as_typed('checkpoints list')}"
        ) from None


def _require_stored(path: Path) -> None:
    """Reject compressed members, which `torch.save` never writes: 3 MB can inflate to 3 GB."""
    if not zipfile.is_zipfile(path):
        return  # torch's older format, or another file
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            is_stored = member.compress_type == zipfile.ZIP_STORED
            if not is_stored or member.file_size != member.compress_size:
                raise ValueError(f"its member {member.filename} is compressed")


def _require_own_elements(content: object) -> None:
    """Reject tensors with more elements than they store: a copy would allocate all of them."""
    pending, seen = [content], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.numel() * item.element_size() > item.untyped_storage().nbytes():
                raise ValueError(f"a tensor claims {tuple(item.shape)} and stores fewer elements")
        elif isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            pending += item


def _failed(path: Path, reason: str) -> CheckpointUnavailableError:
    return CheckpointUnavailableError(
        f"{path} cannot be read: {reason}. Repair the disk or its permissions, or choose another "
        f"checkpoint: {as_typed('checkpoints list')}"
    )


def _reason(error: Exception) -> str:
    text = str(error)
    if match := re.search(r"GLOBAL (\S+)", text):
        return f"it contains {match[1]}, but only tensors and plain values are allowed"
    if match := re.search(r"WeightsUnpickler error: ([^\n]+)", text):
        return match[1].strip().removesuffix(".")
    return text.partition("\n")[0].removesuffix(".") or type(error).__name__
