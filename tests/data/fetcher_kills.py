"""Fetchers that are killed: what they leave, and what is fetched twice.

.venv/bin/python tests/kills.py data.fetcher_kills:Fetches FOLDER --kills 100
"""

import time
from pathlib import Path

import numpy as np
import torch
from data.shard_samples import WatchedBucket, npy_bytes, npz_bytes, pt_bytes, settings
from kills import Victim

from refocused.bucket.bucket import BlobInfo
from refocused.data.cache import cache as cache_module
from refocused.data.cache import shard_download
from refocused.data.cache.cache import ShardCache
from refocused.data.cache.local_shards import LocalShards
from refocused.data.manifest import run_manifest
from refocused.data.manifest.run_manifest import describe_run

SHARDS = 60
TOKENS = 40_000
FIRST_PACK, CHUNKS = 50, 8  # the last shards are packed from chunks
VOCABULARY = 50_000
LONGEST_LIFE_S = 0.06  # about a third of what fetching all takes
MOST_KILLS = 300  # until one has met a shard that comes by ranges


def shard_tokens(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, VOCABULARY, TOKENS).astype(np.uint16)


class LoggedBucket(WatchedBucket):
    """A folder of shards that logs every download to a file, which survives a kill."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "source")
        self.log = folder / "downloads.txt"
        self.log.touch()

    def _note(self, name: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{name}\n")

    def download(self, blob: BlobInfo, target: Path) -> int:
        self._note(blob.name)
        return super().download(blob, target)

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        self._note(name)
        return super().read(name, start=start, length=length)

    def logged(self) -> list[str]:
        return self.log.read_text().split()


class Fetches(Victim):
    """Fetchers of one cache folder, each of which fetches all shards in another order.

    The report's `wrong` shards counted as complete but were not; `again` are complete ones that
    were fetched once more; `left` are what remains of downloads. All must stay empty.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        run_manifest.PACKED_TOKENS = TOKENS
        shard_download.MIN_RANGE_BYTES = 1 << 14  # a shard of 80 KB comes in four ranges
        cache_module.SPLIT_FIRST_SHARDS = 20  # that many of a plan do
        self.folder = Path(folder, "cache")
        self.folder.mkdir(parents=True)
        self.bucket = LoggedBucket(Path(folder))
        self.tokens = [shard_tokens(index) for index in range(SHARDS)]  # names are in this order
        for index, ids in enumerate(self.tokens):
            if index >= FIRST_PACK:
                for number, part in enumerate(np.split(ids, CHUNKS)):
                    chunk = (index - FIRST_PACK) * CHUNKS + number
                    content = pt_bytes(torch.from_numpy(part.astype(np.int64)))
                    self.bucket.put(f"u/chunk_{chunk:06d}.pt", content)
            elif index % 3:
                self.bucket.put(f"t_{index:03d}.npy", npy_bytes(ids))
            else:  # needs a conversion
                self.bucket.put(f"t_{index:03d}.npz", npz_bytes(tokens=ids))
        data = settings(fetch_threads=4)
        self.manifest = describe_run({"": self.bucket}, data)
        assert len(self.manifest.shards) == SHARDS
        self.how = {"data": data, "vocabulary": VOCABULARY}
        self.local = LocalShards(self.folder, {"": self.bucket}, manifest=self.manifest, **self.how)
        self.order = np.random.default_rng(0)
        self.report |= {"ranged": 0, "wrong": [], "again": []}

    def cache(self) -> ShardCache:
        return ShardCache({"": self.bucket}, self.manifest, self.folder, fetches=True, **self.how)

    def whole(self) -> set[int]:
        """The shards that count as complete."""
        return {index for index in range(SHARDS) if self.local.row(index) is not None}

    def is_wrong(self, index: int) -> bool:
        file = self.local.open(index)
        if file is None or file.count != TOKENS:
            return True
        tokens = np.empty(TOKENS, file.dtype)
        file.read_into(tokens, first=0)
        return not np.array_equal(tokens, self.tokens[index])

    def start(self) -> int:
        self.longest_s = LONGEST_LIFE_S * (1 + self.report["kills"] // 30)  # on a busy machine
        if len(self.whole()) == SHARDS:  # all there: lose some as an eviction does, and go on
            for index in self.order.permutation(SHARDS)[: SHARDS // 2]:
                self.local.remove(int(index))
        self.planned = self.order.permutation(SHARDS).tolist()
        self.look()
        return super().start()

    def work(self) -> None:
        self.cache().plan(self.planned)
        time.sleep(60)

    def look(self) -> None:
        """Note what is complete, and what was downloaded so far."""
        self.before, self.logged = self.whole(), len(self.bucket.logged())

    def judge(self) -> None:
        """Compare with what `look` noted."""
        shards = self.manifest.shards
        fetched = set(self.bucket.logged()[self.logged :])
        wrong = [shards[index].name for index in self.whole() if self.is_wrong(index)]
        files = {index: {file.name for file in shards[index].files} for index in self.before}
        self.report["wrong"] += wrong
        self.report["again"] += [shards[i].name for i in self.before if files[i] & fetched]

    def check(self) -> None:
        self.judge()
        self.report["interrupted"] += any(self.folder.glob("incoming/*/*.object*"))
        self.report["ranged"] += any(self.folder.glob("incoming/*/*.ranges"))

    def is_done(self, kills: int) -> bool:
        has_met_ranges = self.report["ranged"] or self.report["kills"] >= MOST_KILLS
        return super().is_done(kills) and bool(has_met_ranges)

    def finish(self) -> None:
        self.look()
        with self.cache() as cache:
            cache.plan(range(SHARDS))
            for index in range(SHARDS):
                cache.open(index)
        self.judge()
        self.report["left"] = [str(path) for path in self.folder.glob("incoming/*")]
