"""Getting 16 shards of 12.5 MB out of a store: our tools beside the others, in one run.

    .venv/bin/python benchmarks/sync.py [--repeats 5] [--json FILE]

The store is shaped: 30 ms before each answer, 20 MB/s for each stream. Then the data wait of a
training-like loop on a link 1.5 times as fast as it needs, and the requests for each object when
eight ranks read on one node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from measuring import (
    ROOT,
    Case,
    Column,
    Record,
    cpu_seconds,
    environment,
    measure,
    medians,
    table,
    write_report,
)
from shaped_store import BUCKET, Shape, shaped_store
from token_samples import SEQUENCE_LENGTH, SHARD_TOKENS, VOCABULARY, npy_folder

if TYPE_CHECKING:
    from refocused.shards.cache import ShardCache
    from refocused.shards.manifest import Manifest

URL = f"gs://{BUCKET}"
RANKS = 8
LINK_ABOVE_NEED = 1.5
STEP_SECONDS, STEP_WINDOWS = 0.05, 64
WORK = Path("/tmp/refocused-benchmarks")
COLUMNS = (
    Column("wall_s", "seconds", "{:.2f}"),
    Column("cpu_s", "CPU-s", "{:.2f}"),
    Column("megabytes_per_second", "MB/s"),
    Column("ratio", "ours = 1", "{:.2f}"),
    Column("gets", "requests", "{:.0f}"),
)
LOOP_COLUMNS = (
    Column("steps", "steps", "{:.0f}"),
    Column("wall_s", "seconds", "{:.2f}"),
    Column("wait_percent", "data wait, %", "{:.2f}"),
    Column("first_wait_s", "first batch, s", "{:.2f}"),
)
NODE_COLUMNS = (
    Column("objects", "objects", "{:.0f}"),
    Column("fewest", "fewest GETs", "{:.0f}"),
    Column("most", "most GETs", "{:.0f}"),
    Column("wall_s", "seconds", "{:.2f}"),
)


def main() -> None:
    """Measure all cases, or the one that `--case` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--json", type=Path, default=WORK / "sync.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        os.environ["STORAGE_EMULATOR_HOST"] = chosen.store
        with tempfile.TemporaryDirectory(dir=chosen.work) as folder:
            print(json.dumps(CASES[chosen.case](Path(folder))))
    else:
        compare(chosen)


def compare(chosen: argparse.Namespace) -> None:
    """Run the cases against one store, print the tables, and write everything down."""
    source = npy_folder(chosen.work)
    gcsfs = environment(chosen.work / "gcsfs", whole=["gcsfs"])
    syncs = [name for name in CASES if name not in ("loop", "rank")]
    pythons = dict.fromkeys(syncs, sys.executable) | {"gcsfs": gcsfs}
    with shaped_store(source, Shape()) as store:
        command = [__file__, "--work", str(chosen.work), "--store", store, "--case"]
        cases = [Case(name, [*command, name], python) for name, python in pythons.items() if python]
        records = measure(cases, repeats=chosen.repeats, timeout_s=120)
        node = measure_node(chosen.work, store)
    rows = {name: medians(found) for name, found in records.items()}
    for row in rows.values():
        row["ratio"] = row["wall_s"] / rows["ours, download_many"]["wall_s"]
    print(
        table(
            rows, COLUMNS, title=f"16 x 12.5 MB at 30 ms and 20 MB/s a stream, of {chosen.repeats}"
        )
    )
    loops = measure_loops(chosen)
    print(table({"ours": medians(loops)}, LOOP_COLUMNS, title="A loop on a link at 1.5 x its need"))
    print(table({f"{RANKS} ranks": node}, NODE_COLUMNS, title="Requests for each object of a node"))
    results = {"sync": records, "loop": loops, "node": node}
    write_report(chosen.json, settings={"repeats": chosen.repeats}, results=results)


def measure_loops(chosen: argparse.Namespace) -> list[Record]:
    """Time a loop whose steps take 50 ms, while the shards come at 1.5 times its need."""
    need = STEP_WINDOWS * SEQUENCE_LENGTH * 2 / STEP_SECONDS
    rate = LINK_ABOVE_NEED * need
    with shaped_store(npy_folder(chosen.work), Shape(stream_rate=rate, total_rate=rate)) as store:
        command = [__file__, "--work", str(chosen.work), "--store", store, "--case", "loop"]
        return measure([Case("loop", command)], repeats=min(3, chosen.repeats), timeout_s=180)[
            "loop"
        ]


def measure_node(work: Path, store: str) -> Record:
    """Let eight ranks of one node read every shard through one cache folder; count the requests."""
    _gets(store)
    folder = work / "node"
    shutil.rmtree(folder, ignore_errors=True)
    began = time.perf_counter()
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--work", str(work), "--store", store, "--case", "rank"],
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}",
                "BENCHMARK_NODE": str(folder),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.DEVNULL,
        )
        for rank in range(RANKS)
    ]
    for process in reversed(ranks):
        if process.wait(120):
            raise SystemExit("a rank of the node failed")
    counts = Counter(_gets(store))
    return {
        "objects": len(counts),
        "fewest": min(counts.values()),
        "most": max(counts.values()),
        "wall_s": time.perf_counter() - began,
    }


def _timed(sync: Callable[[], object], folder: Path) -> Record:
    """Time a sync, and check what it brought."""
    store = os.environ["STORAGE_EMULATOR_HOST"]
    _gets(store)
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
        "gets": sum(_gets(store).values()),
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
    from refocused.batches.loader import Loader
    from refocused.batches.order import Order
    from refocused.batches.position import Position
    from refocused.batches.windows import split_windows
    from refocused.config.batch_plan import BatchPlan

    with _opened_cache(folder, fetches=True) as (cache, manifest):
        split = split_windows(manifest, sequence_length=SEQUENCE_LENGTH)
        loader = Loader(
            Order(split.train, seed=1, block_shards=1),
            cache,
            plan=BatchPlan(STEP_WINDOWS, 1, 1, SEQUENCE_LENGTH),
            rank=0,
            names=[shard.name for shard in manifest.shards],
            pin=False,
            ahead=4,
            room_bytes=None,
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
    from refocused.shards.cache import ShardCache
    from refocused.shards.manifest import build_manifest

    data = DataConfig(source=URL, fetch_threads=8)
    bucket = GcsBucket(URL)
    manifest = build_manifest(bucket, data, cache_file=WORK / "store_counts.json")
    with ShardCache(
        bucket, manifest, folder, data=data, vocabulary=VOCABULARY, fetches=fetches
    ) as cache:
        yield cache, manifest


def _gets(store: str) -> dict[str, int]:
    """Return how often each object was downloaded since the last call."""
    with urllib.request.urlopen(f"{store}/gets") as answer:
        found: dict[str, int] = json.load(answer)
    return found


if __name__ == "__main__":
    main()
