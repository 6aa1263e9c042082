"""The same tokens in every format that a contender reads, created once in a working folder."""

import shutil
from pathlib import Path
from typing import Literal

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


def token_folder(work: Path, kind: Literal["npy", "npz", "bin"]) -> Path:
    """Return the folder of 16 `.npy` or compressed `.npz` shards, or of nanoGPT's `train.bin`.

    It gets its name once it is complete.
    """
    folder, part = work / kind, work / f"{kind}.part"
    if folder.exists():
        return folder
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for number in range(SHARDS):
        tokens, file = shard_tokens(number), part / f"shard_{number:02d}.{kind}"
        if kind == "npy":
            np.save(file, tokens)
        elif kind == "npz":
            np.savez_compressed(file, tokens=tokens)
        else:
            with (part / "train.bin").open("ab") as whole:
                whole.write(tokens.tobytes())
    part.rename(folder)
    return folder
