"""What no loader of these files can be faster than on this machine: one row for each floor."""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measuring import Record, cpu_seconds
from token_samples import ROWS, SEQUENCE_LENGTH, SHARD_TOKENS, npy_folder, npz_folder

BATCHES = 18_000  # about six epochs
HEADER_BYTES = 128
# Each batch goes to memory of its own, more of them than a loader that reads ahead has in use:
# one batch written again and again would never leave the processor's nearest cache.
BATCHES_IN_USE = 24


def widening(work: Path) -> Record:
    """Widen the same 8 x 2,049 uint16 to int64 inputs and labels, batch after batch."""
    stage, widen = _widening()
    stage[:] = np.arange(stage.size).reshape(stage.shape) % 50_257
    return _timed(BATCHES * ROWS * SEQUENCE_LENGTH, lambda: _repeat(widen))


def reading_and_widening(work: Path) -> Record:
    """Read 8 windows at random places by `preadv`, then widen them: no order, no thread."""
    stage, widen = _widening()
    rows = [memoryview(row) for row in stage]
    files = [os.open(path, os.O_RDONLY) for path in sorted(npy_folder(work).iterdir())]
    draw = np.random.default_rng(0)
    chosen = draw.integers(0, len(files), (BATCHES, ROWS)).tolist()
    windows = draw.integers(0, (SHARD_TOKENS - 1) // SEQUENCE_LENGTH, (BATCHES, ROWS))
    offsets = (HEADER_BYTES + windows * SEQUENCE_LENGTH * 2).tolist()

    def read(batch: int) -> None:
        for row, file, offset in zip(rows, chosen[batch], offsets[batch], strict=True):
            os.preadv(files[file], [row], offset)
        widen(batch)

    try:
        return _timed(BATCHES * ROWS * SEQUENCE_LENGTH, lambda: _repeat(read))
    finally:
        for file in files:
            os.close(file)


def inflating(work: Path) -> Record:
    """Inflate the compressed shards as ours does, and do nothing with what comes out."""
    from refocused.data.formats.object_reader import member_reader

    return _inflated(
        work, lambda file, archive: member_reader(file, archive, "tokens.npy", offset=0)
    )


def inflating_by_zlib(work: Path) -> Record:
    """Inflate them as numpy does."""
    return _inflated(work, lambda _, archive: archive.open("tokens.npy").read)


# What any first pass of .npz costs at the least includes the comparison of each member's CRC-32.
FLOORS: dict[str, Callable[[Path], Record]] = {
    "floor: widening alone": widening,
    "floor: preadv and widening": reading_and_widening,
    "floor of .npz: our inflate": inflating,
    "floor of .npz: zlib's": inflating_by_zlib,
}


def _widening() -> tuple[np.ndarray, Callable[[int], None]]:
    """Return rows of uint16, and what widens them into the memory of a batch's number."""
    stage = np.zeros((ROWS, SEQUENCE_LENGTH + 1), np.uint16)
    memory = np.zeros((BATCHES_IN_USE, 2, ROWS, SEQUENCE_LENGTH), np.int64)

    def widen(batch: int) -> None:
        inputs, labels = memory[batch % BATCHES_IN_USE]
        inputs[:] = stage[:, :-1]
        labels[:] = stage[:, 1:]

    return stage, widen


def _repeat(call: Callable[[int], None]) -> None:
    for batch in range(BATCHES):
        call(batch)


def _inflated(work: Path, reader: Callable[..., Callable[[int], bytes]]) -> Record:
    paths = sorted(npz_folder(work).glob("*.npz"))

    def inflate() -> None:
        for path in paths:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                read = reader(file, archive)
                while read(1 << 18):
                    pass

    return _timed(len(paths) * SHARD_TOKENS, inflate)


def _timed(tokens: int, call: Callable[[], None]) -> Record:
    cpu, wall = cpu_seconds(), time.perf_counter()
    call()
    return {
        "tokens_per_second": tokens / (time.perf_counter() - wall),
        "tokens_per_cpu_second": tokens / (cpu_seconds() - cpu),
    }
