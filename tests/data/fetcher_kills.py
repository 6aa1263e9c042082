"""Kill fetchers at random times, and check what they leave and what is fetched twice.

    .venv/bin/python tests/data/fetcher_kills.py FOLDER --kills 100

Fetchers are forked after all imports, so that each takes only milliseconds.
"""

import argparse
import functools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from shard_samples import WatchedBucket, npy_bytes, npz_bytes, pt_bytes, settings

from refocused.bucket.bucket import BlobInfo
from refocused.data.cache import fetch_threads as fetcher
from refocused.data.cache import shard_download
from refocused.data.cache.cache import ShardCache
from refocused.data.cache.local_shards import LocalShards
from refocused.data.manifest import run_manifest
from refocused.data.manifest.run_manifest import build_run_manifest

SHARDS = 60
TOKENS = 40_000
FIRST_PACK, CHUNKS = 50, 8  # the last shards are packed from chunks
run_manifest.PACKED_TOKENS = TOKENS
shard_download.MIN_RANGE_BYTES = 1 << 14  # a shard of 80 KB comes in four ranges
fetcher.SPLIT_FIRST_SHARDS = 20  # that many of a plan do
VOCABULARY = 50_000
LONGEST_LIFE_S = 0.06  # about a third of what fetching all takes


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


class Kills:
    """Killed fetchers of one cache folder.

    The report's `wrong` shards counted as complete but were not; `again` are complete ones that
    were fetched once more. Both must stay empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cache"
        self.bucket = LoggedBucket(folder)
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
        self.manifest = build_run_manifest(self.bucket, data, cache_file=None)
        assert len(self.manifest.shards) == SHARDS
        self.how = {"data": data, "vocabulary": VOCABULARY}
        self.local = LocalShards(self.folder, manifest=self.manifest, **self.how)
        self.report = {"kills": 0, "interrupted": 0, "ranged": 0, "wrong": [], "again": []}

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

    def live(self, life: Callable[[], None]) -> None:
        """Run a fetcher, and check what it leaves."""
        shards, before, logged = self.manifest.shards, self.whole(), len(self.bucket.logged())
        life()
        fetched = set(self.bucket.logged()[logged:])
        files = {index: {file.name for file in shards[index].files} for index in before}
        wrong = [shards[index].name for index in self.whole() if self.is_wrong(index)]
        self.report["wrong"] += wrong
        self.report["again"] += [shards[i].name for i in before if files[i] & fetched]

    def killed_life(self, order: Sequence[int], seconds: float) -> None:
        """Fork a fetcher, and kill it after some seconds."""
        child = os.fork()
        if not child:
            self.cache().plan(order)
            time.sleep(60)
            os._exit(0)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def whole_life(self) -> None:
        with self.cache() as cache:
            cache.plan(range(SHARDS))
            for index in range(SHARDS):
                cache.open(index)


def run_kills(folder: Path, *, kills: int, seed: int) -> dict[str, object]:
    """Kill at least `kills` fetchers, until downloads were interrupted; then let one finish."""
    folder.mkdir(parents=True, exist_ok=True)
    site, chance = Kills(folder), random.Random(seed)
    report = site.report
    while report["kills"] < kills or (not report["ranged"] and report["kills"] < 10 * kills):
        longest_s = LONGEST_LIFE_S * (1 + report["kills"] // kills)  # on a machine that is busy
        report["kills"] += 1
        if len(site.whole()) == SHARDS:  # all there: lose some as an eviction does, and go on
            for index in chance.sample(range(SHARDS), SHARDS // 2):
                site.local.remove(index)
        order, seconds = chance.sample(range(SHARDS), SHARDS), chance.uniform(0.0, longest_s)
        site.live(functools.partial(site.killed_life, order, seconds))
        report["interrupted"] += any(site.folder.rglob("incoming/*/*"))
        report["ranged"] += any(site.folder.rglob("incoming/*/*.ranges"))
    site.live(site.whole_life)
    return {**report, "left": [str(path) for path in site.folder.rglob("incoming/*")]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    print(json.dumps(run_kills(chosen.folder, kills=chosen.kills, seed=chosen.seed)))
