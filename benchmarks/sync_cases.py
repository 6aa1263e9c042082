"""Ways to get shards out of a store, ours and others, and what reads them meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from measuring import Record, cpu_seconds
from shaped_store import BUCKET, asked_for
from token_samples import SEQUENCE_LENGTH, SHARD_TOKENS, VOCABULARY

if TYPE_CHECKING:
    from refocused.data.cache.cache import ShardCache
    from refocused.data.manifest.shard_manifest import Manifest

URL = f"gs://{BUCKET}"
RANKS = 8
STEP_SECONDS, STEP_WINDOWS = 0.05, 64
WORK = Path("/tmp/refocused-benchmarks")


def _timed(sync: Callable[[], object], folder: Path) -> Record:
    """Time a sync, and check what it brought."""
    store = os.environ["STORAGE_EMULATOR_HOST"]
    asked_for(store)
    cpu, wall = cpu_seconds(), time.perf_counter()
    sync()
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    wanted = 16 * (2 * SHARD_TOKENS + 128)
    got = sum(size for size in sizes if size > 1e6)
    if got != wanted:
        raise SystemExit(f"{got:,} bytes came, {wanted:,} expected")
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "megabytes_per_second": wanted / wall / 1e6,
        "gets": sum(asked.requests for asked in asked_for(store).values()),
    }


def ours(folder: Path) -> Record:
    """`download_many`: resumable, whole-file crc32c, fsync, rename."""
    from google.cloud import storage  # noqa: F401 - its import is not the sync

    from refocused.bucket.gcs import GcsBucket
    from refocused.bucket.transfer import download_many

    bucket = GcsBucket(URL)
    return _timed(lambda: download_many(bucket, list(bucket.list()), folder, threads=8), folder)


def ours_through_the_cache(folder: Path) -> Record:
    """`ShardCache`: the same, and measured, published and indexed for training."""
    from google.cloud import storage  # noqa: F401

    from refocused.bucket.gcs import GcsBucket  # noqa: F401
    from refocused.data.cache.cache import ShardCache  # noqa: F401

    def sync() -> None:
        with _opened_cache(folder, fetches=True) as (cache, manifest):
            cache.plan(range(len(manifest.shards)))
            for index in range(len(manifest.shards)):
                cache.open(index)

    return _timed(sync, folder)


def naive(folder: Path) -> Record:
    """One `download_to_filename` after the other, as scripts do."""
    from google.cloud import storage

    def sync() -> None:
        for blob in storage.Client(project="x").list_blobs(BUCKET):
            blob.download_to_filename(str(folder / blob.name))

    return _timed(sync, folder)


def transfer_manager(folder: Path) -> Record:
    """google-cloud-storage's own tool, with threads."""
    from google.cloud import storage
    from google.cloud.storage import transfer_manager as manager

    def sync() -> None:
        bucket = storage.Client(project="x").bucket(BUCKET)
        names = [blob.name for blob in bucket.list_blobs()]
        results = manager.download_many_to_path(
            bucket, names, destination_directory=str(folder), max_workers=8, worker_type="thread"
        )
        if any(results):
            raise SystemExit(str(results))

    return _timed(sync, folder)


def gcsfs(folder: Path) -> Record:
    """Gcsfs, many files at once."""
    # Otherwise it asks by gRPC, which this store does not speak, what kind of bucket it is.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    from gcsfs import GCSFileSystem

    def sync() -> None:
        files = GCSFileSystem(token="anon", endpoint_url=os.environ["STORAGE_EMULATOR_HOST"])
        names = files.ls(BUCKET, detail=False)
        files.get(names, [str(folder / Path(name).name) for name in names], batch_size=8)

    return _timed(sync, folder)


def loop(folder: Path) -> Record:
    """Train on nothing: take a step's batches, then sleep as long as a step computes."""
    from refocused.config.batch_plan import BatchPlan
    from refocused.data.cache.fetch_plan import FetchAhead
    from refocused.data.loader.loader import Loader
    from refocused.data.order.position import Position
    from refocused.data.order.window_order import Order
    from refocused.data.order.windows import split_windows

    with _opened_cache(folder, fetches=True) as (cache, manifest):
        split = split_windows(manifest, sequence_length=SEQUENCE_LENGTH)
        loader = Loader(
            Order(split.train, seed=1, block_shards=1),
            cache,
            plan=BatchPlan(STEP_WINDOWS, 1, 1, SEQUENCE_LENGTH),
            rank=0,
            ahead=FetchAhead(4),
        )
        stream = loader.batches_from(Position())
        stream.next_step()
        first, began = stream.wait_seconds, time.perf_counter()
        steps = len(manifest.shards) * ((SHARD_TOKENS - 1) // SEQUENCE_LENGTH) // STEP_WINDOWS - 1
        for _ in range(steps):
            time.sleep(STEP_SECONDS)
            stream.next_step()
        wall = time.perf_counter() - began
        waited = stream.wait_seconds - first
        stream.close()
    return {
        "steps": steps,
        "wall_s": wall,
        "first_wait_s": first,
        "wait_percent": 100 * waited / wall,
    }


def rank(_: Path) -> Record:
    """One of the ranks of `measure_node`; the fetcher ends after the others."""
    first = os.environ["LOCAL_RANK"] == "0"
    folder = Path(os.environ["BENCHMARK_NODE"])
    with _opened_cache(folder, fetches=first) as (cache, manifest):
        cache.plan(range(len(manifest.shards)))
        for index in range(len(manifest.shards)):
            cache.open(index)
        (folder / f"done-{os.environ['LOCAL_RANK']}").touch()
        while first and len(list(folder.glob("done-*"))) < RANKS:
            time.sleep(0.05)
    return {}


CASES: dict[str, Callable[[Path], Record]] = {
    "ours, download_many": ours,
    "ours, ShardCache": ours_through_the_cache,
    "transfer_manager, 8 threads": transfer_manager,
    "gcsfs": gcsfs,
    "naive loop": naive,
    "loop": loop,
    "rank": rank,
}


@contextlib.contextmanager
def _opened_cache(folder: Path, *, fetches: bool) -> Iterator[tuple[ShardCache, Manifest]]:
    """Open a cache over the store, its manifest built as a run does it."""
    from refocused.bucket.gcs import GcsBucket
    from refocused.config.data import DataConfig
    from refocused.data.cache.cache import ShardCache
    from refocused.data.manifest.shard_manifest import build_manifest

    data = DataConfig(source=URL, fetch_threads=8)
    bucket = GcsBucket(URL)
    manifest = build_manifest(bucket, data, cache_file=WORK / "store_counts.json")
    with ShardCache(
        bucket, manifest, folder, data=data, vocabulary=VOCABULARY, fetches=fetches
    ) as cache:
        yield cache, manifest
