"""Compare tools that download 16 shards of 12.5 MB from a store, in one run.

    .venv/bin/python benchmarks/sync.py [--repeats 5] [--json FILE]

The store is shaped: 30 ms before each answer, 20 MB/s for each stream.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from measuring import (
    WORK,
    Case,
    Column,
    Record,
    cpu_seconds,
    measure,
    medians,
    parser_of,
    table,
    write_report,
)
from shaped_store import BUCKET, Shape, requests_to, shaped_store
from token_samples import SHARD_TOKENS, VOCABULARY, token_folder

if TYPE_CHECKING:
    from refocused.data.cache.cache import ShardCache
    from refocused.data.manifest.shard_manifest import Manifest

URL = f"gs://{BUCKET}"
COLUMNS = (
    Column("wall_s", "seconds", "{:.2f}"),
    Column("cpu_s", "CPU-s", "{:.2f}"),
    Column("megabytes_per_second", "MB/s"),
    Column("ratio", "ours = 1", "{:.2f}"),
    Column("gets", "requests", "{:.0f}"),
)


def main() -> None:
    """Measure all cases, or the one that `--case` names."""
    parser = parser_of(__file__, __doc__, repeats=5)
    parser.add_argument("--work", type=Path, default=WORK)
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
    """Run the cases against one store, print the tables, and write the JSON."""
    source = token_folder(chosen.work, "npy")
    with shaped_store(source, Shape()) as store:
        command = [__file__, "--work", str(chosen.work), "--store", store, "--case"]
        cases = [Case(name, [*command, name]) for name in CASES]
        records = measure(cases, repeats=chosen.repeats, timeout_s=120)
    rows = {name: medians(found) for name, found in records.items()}
    for row in rows.values():
        row["ratio"] = row["wall_s"] / rows["ours, download_many"]["wall_s"]
    title = f"16 x 12.5 MB at 30 ms and 20 MB/s a stream, of {chosen.repeats}"
    print(table(rows, COLUMNS, title=title))
    write_report(chosen, records)


def _timed(sync: Callable[[], object], folder: Path) -> Record:
    """Time a sync, and check its files."""
    store = os.environ["STORAGE_EMULATOR_HOST"]
    requests_to(store)
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
        "gets": requests_to(store),
    }


def ours(folder: Path) -> Record:
    """`download_many`: resumable, whole-file crc32c, fsync, rename."""
    from google.cloud import storage  # noqa: F401 - its import is not the sync

    from refocused.bucket.open_bucket import open_bucket
    from refocused.bucket.transfer import download_many

    bucket = open_bucket(URL)
    return _timed(lambda: download_many(bucket, list(bucket.list()), folder, threads=8), folder)


def ours_through_the_cache(folder: Path) -> Record:
    """`ShardCache`: the same, and measured, published and indexed for training."""
    from google.cloud import storage  # noqa: F401

    import refocused.bucket.gcs  # noqa: F401
    from refocused.data.cache.cache import ShardCache  # noqa: F401

    def sync() -> None:
        with _opened_cache(folder) as (cache, manifest):
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


CASES: dict[str, Callable[[Path], Record]] = {
    "ours, download_many": ours,
    "ours, ShardCache": ours_through_the_cache,
    "transfer_manager, 8 threads": transfer_manager,
    "naive loop": naive,
}


@contextlib.contextmanager
def _opened_cache(folder: Path) -> Iterator[tuple[ShardCache, Manifest]]:
    """Open a cache over the store, its manifest built as a run does it."""
    from refocused.bucket.open_bucket import open_bucket
    from refocused.config.data import DataConfig
    from refocused.data.cache.cache import ShardCache
    from refocused.data.manifest.shard_manifest import build_manifest

    data = DataConfig(source=URL, fetch_threads=8)
    bucket = open_bucket(URL)
    manifest = build_manifest(bucket, data, cache_file=WORK / "store_counts.json")
    with ShardCache(
        {"": bucket}, manifest, folder, data=data, vocabulary=VOCABULARY, fetches=True
    ) as cache:
        yield cache, manifest


if __name__ == "__main__":
    main()
