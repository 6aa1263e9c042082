"""One local shard, open for reading: tokens are copied out of it by position."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy.typing as npt

from refocused.data.formats.array_headers import read_npy_header
from refocused.system.errors import ShardError

Tokens = npt.NDArray[Any]


class TokenFile:
    """The tokens of one shard in its local form; several threads may read one.

    It is read by position and not mapped into memory: what was read does not stay in this process
    (a map of 200 MB of shards grew it by 178 MB, and took twice the CPU time a token), and a disk
    that fails is an error that names the shard, where a map ends the process by a signal. A file
    that is removed meanwhile stays readable.

    Args:
        path: The local file.
        name: The shard, for messages.

    Attributes:
        count: Tokens in it.
        dtype: Their type: uint16 or uint32.

    Raises:
        FileNotFoundError: It is not there.
        ShardError: It is no `.npy`.
    """

    def __init__(self, path: Path, *, name: str) -> None:
        with path.open("rb") as file:
            header = read_npy_header(file, what=str(path))
            self._descriptor = os.dup(file.fileno())
        self._name = name
        self._offset = header.bytes
        self._token_bytes = header.dtype.itemsize
        self.count = header.shape[0]
        self.dtype = header.dtype

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read_into(self, tokens: Tokens | memoryview, *, first: int) -> None:
        """Fill `tokens`, of the file's type or the bytes of as many, from number `first` on.

        Raises:
            ShardError: The file ends before, or the disk cannot be read.
        """
        offset = self._offset + first * self._token_bytes
        try:
            # numpy's arrays are buffers to type checkers from Python 3.12 on.
            read = os.preadv(self._descriptor, [tokens], offset)  # type: ignore[list-item]
        except OSError as error:
            raise ShardError(
                f"{self._name}: its local copy cannot be read ({error.strerror}). Check the disk "
                "of data.cache, or set data.cache to another one."
            ) from error
        if read != tokens.nbytes:
            raise ShardError(
                f"{self._name}: its local copy ends at {offset + read:,} bytes, "
                f"{offset + tokens.nbytes:,} expected: it was cut since it was fetched. Start "
                "again: it is fetched anew."
            )
