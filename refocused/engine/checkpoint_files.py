"""How DeepSpeed's checkpoint files reach the disk: hashed while written, synced, never raising."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import google_crc32c
import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine


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
    """

    def __init__(self, file: IO[bytes]) -> None:
        """Wrap an open binary file."""
        self._file = file
        self._crc = 0
        self.size = 0
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        """Write bytes or a buffer; return its length, also after a failure."""
        view = memoryview(content).cast("B")
        if self.error is None:
            try:
                self._file.write(view)
                self._crc = google_crc32c.extend(self._crc, bytes(view))
            except OSError as error:
                self.error = error
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Hand all bytes to the disk, and wait for it."""
        if self.error is None:
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                self.error = error

    @property
    def crc32c(self) -> int:
        """The CRC-32C of all bytes so far."""
        return int(self._crc)


def save_hashed(content: Any, path: Path) -> WrittenFile:
    """Write an object with torch.save to a new file.

    Raises:
        OSError: The disk is full, read-only or failing.
    """
    with path.open("xb") as file:
        writer = HashingWriter(file)
        torch.save(content, cast("IO[bytes]", writer))  # write and flush are all it uses
        writer.flush()
        if writer.error is not None:
            raise writer.error
    return WrittenFile(path, writer.size, writer.crc32c)


class HashingCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's checkpoint engine over `save_hashed`.

    An error on one rank must not leave the others inside a collective, so that it is kept in
    `errors` for the owner to gather.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.name = "refocused"
        self.written: list[WrittenFile] = []
        self.errors: list[OSError] = []

    def create(self, info: CheckpointCommitInfo) -> None:
        """Start a save: forget the last one's files."""
        self.written, self.errors = [], []

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file, or keep the reason why not."""
        try:
            self.written.append(save_hashed(state_dict, Path(path)))
        except OSError as error:
            self.errors.append(error)

    def bearing(self, write: Callable[[str], None]) -> Callable[[str], None]:
        """Wrap a function of DeepSpeed's that writes a file: its failure is kept, not raised."""

        def borne(folder: str) -> None:
            try:
                write(folder)
            except OSError as error:
                self.errors.append(error)

        return borne

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file back; its digest was verified before (DeepSpeed's files hold objects)."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Nothing to do: the step directory is committed by its owner."""
        return True
