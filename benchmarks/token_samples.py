"""The same tokens in every format that a contender reads, created once in a working folder."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

SHARDS = 16
SHARD_TOKENS = 6_250_000  # 12.5 MB of uint16
VOCABULARY = 50_257
SEQUENCE_LENGTH = 2048
ROWS = 8


def shard_tokens(number: int) -> npt.NDArray[np.uint16]:
    """Return the ids of a shard by Zipf's law: the n-th most frequent about 1/n as often."""
    draw = np.random.default_rng(number)
    ranks = np.exp(draw.random(SHARD_TOKENS, dtype=np.float32) * np.log(VOCABULARY))
    ids = np.minimum(ranks.astype(np.int64) - 1, VOCABULARY - 1)
    tokens: npt.NDArray[np.uint16] = (ids * 25_013 % VOCABULARY).astype(np.uint16)
    return tokens


def npy_folder(work: Path) -> Path:
    """Return the folder of 16 `.npy` shards."""
    return _once(work / "npy", _write_npy)


def npz_folder(work: Path) -> Path:
    """Return the folder of 16 compressed `.npz` shards."""
    return _once(work / "npz", _write_npz)


def one_file(work: Path) -> Path:
    """Return the headerless file of all tokens that nanoGPT reads."""
    return _once(work / "bin", _write_bin) / "train.bin"


def _once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Create a folder unless it exists; it gets its name once it is complete."""
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        part.rename(folder)
    return folder


def _write_npy(folder: Path) -> None:
    for number in range(SHARDS):
        np.save(folder / f"shard_{number:02d}.npy", shard_tokens(number))


def _write_npz(folder: Path) -> None:
    for number in range(SHARDS):
        np.savez_compressed(folder / f"shard_{number:02d}.npz", tokens=shard_tokens(number))


def _write_bin(folder: Path) -> None:
    with (folder / "train.bin").open("wb") as file:
        for number in range(SHARDS):
            file.write(shard_tokens(number).tobytes())
