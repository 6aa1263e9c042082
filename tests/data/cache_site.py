"""A watched bucket of ten shards, and caches over it."""

from pathlib import Path
from typing import Any

import numpy as np
from shard_samples import WatchedBucket, cache_of, npy_bytes, settings

from refocused.data.cache.cache import ShardCache

SHARDS = 10
VOCABULARY = 2000
SHARD_BYTES = 128 + 2 * 100
OBJECT_BYTES = 128 + 4 * 100  # on disk, too, while the shard is converted


def shard_tokens(index: int) -> np.ndarray:
    return np.arange(100, dtype=np.int32) + 100 * index


class Site:
    """A bucket of ten shards, a cache folder, and the opened caches."""

    vocabulary = VOCABULARY

    def __init__(self, folder: Path) -> None:
        self.bucket: Any = WatchedBucket(folder / "source")
        for index in range(SHARDS):
            self.bucket.put(f"a/t_{index}.npy", npy_bytes(shard_tokens(index)))
        self.folder = folder / "cache"
        self.opened: list[ShardCache] = []

    def cache(self, *, fetches: bool = True, **changes: Any) -> ShardCache:
        how = {"vocabulary": self.vocabulary, "fetches": fetches}
        cache = cache_of(self.bucket, self.folder, settings(**changes), **how)
        self.opened.append(cache)
        return cache

    def local_names(self) -> set[str]:
        """The names of the objects that are local."""
        return {path.name.partition(".npy")[0] for path in self.folder.rglob("shards/t_*.npy")}

    def local_file(self, index: int) -> Path:
        (found,) = self.folder.rglob(f"shards/t_{index}.npy.*.npy")
        return found
