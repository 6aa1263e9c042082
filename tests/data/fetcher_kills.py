"""A fetcher killed at random moments, again and again: what it leaves, and what it fetches twice.

    .venv/bin/python tests/data/fetcher_kills.py FOLDER --kills 100

A process that has imported everything forks each fetcher, so that a life takes milliseconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Sequence
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
from refocused.data.manifest.shard_manifest import Manifest

SHARDS = 60
TOKENS = 40_000
FIRST_PACK, CHUNKS = 50, 8  # the last shards are packed from chunks
run_manifest.PACKED_TOKENS = TOKENS
shard_download.SMALLEST_RANGE_BYTES = 1 << 14  # a shard of 80 KB comes in four ranges
fetcher.SPLIT_FIRST_SHARDS = 20  # that many of a plan do
VOCABULARY = 50_000
LONGEST_LIFE_S = 0.06  # about a third of what fetching all takes


def shard_tokens(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, VOCABULARY, TOKENS).astype(np.uint16)


class LoggedBucket(WatchedBucket):
    """A folder of shards that notes every download in a file, which outlives a killed process."""

    def __init__(self, folder: Path, log: Path) -> None:
        super().__init__(folder)
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def download(self, blob: BlobInfo, target: Path) -> int:
        os.write(self._log, f"{blob.name}\n".encode())
        return super().download(blob, target)

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        os.write(self._log, f"{name}\n".encode())
        return super().read(name, start=start, length=length)


@dataclasses.dataclass
class Report:
    """What the kills did; the three lists of names must be empty."""

    kills: int = 0
    interrupted: int = 0  # lives that left an unfinished file behind
    ranged: int = 0  # of those, lives that left a file of which some ranges had come
    downloads: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)  # counted as whole and were not
    again: list[str] = dataclasses.field(default_factory=list)  # were whole and fetched once more
    left: list[str] = dataclasses.field(default_factory=list)  # files after the last, whole life


class Site:
    """A source, a cache folder, and the log of downloads."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "downloads.txt"
        self.cache_folder = folder / "cache"
        self.bucket = LoggedBucket(folder / "source", self.log)
        for index in range(SHARDS):
            if index >= FIRST_PACK:
                for number, ids in enumerate(np.split(shard_tokens(index), CHUNKS)):
                    chunk = (index - FIRST_PACK) * CHUNKS + number
                    content = pt_bytes(torch.from_numpy(ids.astype(np.int64)))
                    self.bucket.put(f"u/chunk_{chunk:06d}.pt", content)
            elif index % 3:
                self.bucket.put(f"t_{index:03d}.npy", npy_bytes(shard_tokens(index)))
            else:  # takes the way through a conversion
                self.bucket.put(f"t_{index:03d}.npz", npz_bytes(tokens=shard_tokens(index)))
        self.data = settings(fetch_threads=4)
        self.manifest: Manifest = build_run_manifest(self.bucket, self.data, cache_file=None)
        assert len(self.manifest.shards) == SHARDS
        self.local = LocalShards(
            self.cache_folder, manifest=self.manifest, data=self.data, vocabulary=VOCABULARY
        )
        self._tokens = [shard_tokens(index) for index in range(SHARDS)]  # names are in this order

    def cache(self) -> ShardCache:
        how = {"data": self.data, "vocabulary": VOCABULARY, "fetches": True}
        return ShardCache(self.bucket, self.manifest, self.cache_folder, **how)

    def whole(self) -> set[int]:
        """The shards that a next life takes for whole."""
        return {index for index in range(SHARDS) if self.local.row(index) is not None}

    def is_wrong(self, index: int) -> bool:
        file = self.local.open(index)
        if file is None or file.count != TOKENS:
            return True
        tokens = np.empty(TOKENS, file.dtype)
        file.read_into(tokens, first=0)
        return not np.array_equal(tokens, self._tokens[index])

    def downloads(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


def run_kills(folder: Path, *, kills: int, seed: int) -> Report:
    """Kill `kills` fetchers or more, until downloads were interrupted; then let one finish."""
    site, chance, report = Site(folder), random.Random(seed), Report()
    while report.kills < kills or (not report.ranged and report.kills < 10 * kills):
        longest_s = LONGEST_LIFE_S * (1 + report.kills // kills)  # on a machine that is busy
        report.kills += 1
        before, logged = site.whole(), len(site.downloads())
        if len(before) == SHARDS:  # all there: lose some as an eviction does, and go on
            for index in chance.sample(sorted(before), SHARDS // 2):
                site.local.remove(index)
            before = site.whole()
        order = chance.sample(range(SHARDS), SHARDS)
        _one_life(site, order, chance.uniform(0.0, longest_s))
        report.interrupted += any(site.cache_folder.rglob("incoming/*/*"))
        report.ranged += any(site.cache_folder.rglob("incoming/*/*.ranges"))
        _check(site, report, before, logged)
    before, logged = site.whole(), len(site.downloads())
    with site.cache() as cache:
        cache.plan(range(SHARDS))
        for index in range(SHARDS):
            cache.open(index)
    _check(site, report, before, logged)
    report.left = [str(path) for path in site.cache_folder.rglob("incoming/*")]
    report.downloads = len(site.downloads())
    return report


def _one_life(site: Site, order: Sequence[int], seconds: float) -> None:
    """Fork a fetcher and kill it; the clock starts with its first moment."""
    child = os.fork()
    if not child:
        cache = site.cache()
        cache.plan(order)
        time.sleep(60)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _check(site: Site, report: Report, before: set[int], logged: int) -> None:
    shards = site.manifest.shards
    report.wrong += [shards[index].name for index in site.whole() if site.is_wrong(index)]
    fetched = set(site.downloads()[logged:])
    files = {index: {file.name for file in shards[index].files} for index in before}
    report.again += [shards[index].name for index in before if files[index] & fetched]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    report = run_kills(chosen.folder, kills=chosen.kills, seed=chosen.seed)
    print(json.dumps(dataclasses.asdict(report)))
