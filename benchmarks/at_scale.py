"""Measure what grows with ranks, tokens, shards and checkpoints, on one machine.

    .venv/bin/python benchmarks/at_scale.py [--repeats 3] [--json FILE]

* order: 1 T tokens in 10,000 shards for 1,024 ranks. One process plays a rank: it starts, makes
  steps and plans the cache of its machine, and resumes in the third epoch.
* all ranks: one process takes the share of each of the 1,024 in some steps, and checks that
  together they are the stream's next sequences, each once.
* manifest: 100,000 shards, from a store with 30 ms before each answer.
* checkpoints: a listing of 1,000 in such a store, by names, sizes and marks, and with the manifest
  of each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import google_crc32c
import numpy as np
from measuring import (
    Case,
    Column,
    Record,
    machine,
    measure,
    medians,
    parser_of,
    table,
    write_report,
)
from numpy.typing import NDArray
from shaped_store import BUCKET, PAPER, Shape, requests_to, shaped_store

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, CheckpointManifest
from refocused.config.batch_plan import BatchPlan
from refocused.config.data import DataConfig
from refocused.data.cache.cache import ShardCache
from refocused.data.cache.fetch_plan import ShardPlanner
from refocused.data.loader.loader import StepSequences, steps_from
from refocused.data.manifest.run_manifest import describe_run
from refocused.data.manifest.shard_manifest import Manifest, Shard, manifest_to_json
from refocused.data.order.sequence_order import Order
from refocused.data.order.sequences import Located, Position, split_sequences

RANKS, MICRO, LENGTH = 1024, 2, 2048
TOKENS, SHARD_TOKENS, VOCABULARY = 10**12, 10**8, 50_257
LIMIT_GB = 50.0
MANY_SHARDS, CHECKPOINTS, FILES = 100_000, 1000, 18
STEPS, STEPS_BELOW = 200, "run/checkpoints"
COLUMNS = (
    Column("start_s", "start, s", "{:.2f}"),
    Column("step_ms", "a step, ms", "{:.2f}"),
    Column("resume_s", "resume, s", "{:.2f}"),
    Column("memory_mib", "memory, MiB", "{:.0f}"),
    Column("planned_gb", "GB planned", "{:.1f}"),
    Column("wall_s", "seconds", "{:.2f}"),
    Column("cpu_s", "CPU-s", "{:.2f}"),
    Column("requests", "requests", "{:,.0f}"),
)


def main() -> None:
    """Measure all cases, or the one that `--case` names."""
    parser = parser_of(__file__, __doc__, repeats=3)
    parser.add_argument("--only", default="", help="measure the cases whose name holds this text")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(CASES[chosen.case]()))
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / PAPER).write_text(json.dumps(_shards_on_paper() | _steps_on_paper()))
        with shaped_store(Path(folder), Shape()) as store:
            os.environ["STORAGE_EMULATOR_HOST"] = store
            cases = [Case(one, [__file__, "--case", one]) for one in CASES if chosen.only in one]
            records = measure(cases, repeats=chosen.repeats, timeout_s=600)
    rows = {name: medians(found) for name, found in records.items()}
    title = f"At scale, medians of {chosen.repeats} ({machine()['processor']})"
    print(table(rows, COLUMNS, title=title))
    write_report(chosen, records)


def rank(number: int) -> Record:
    """Play one rank: start, make steps with the plans of its cache, and resume."""

    class Planned(ShardCache):
        shards: Sequence[int] = ()

        def plan(self, needed: Sequence[int]) -> None:
            self.shards = needed
            super().plan(needed)

    manifest, before = _manifest(TOKENS // SHARD_TOKENS), _memory_mib()
    data = DataConfig(source="gs://paper", disk_limit_gb=LIMIT_GB, fetch_ahead_seconds=0)
    plan = BatchPlan(MICRO, 1, RANKS, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        order = _order(manifest)
        cache = Planned(
            {"": DirectoryBucket(Path(folder))},
            manifest,
            Path(folder),
            data=data,
            vocabulary=VOCABULARY,
            fetches=False,
        )
        planner = ShardPlanner(
            order,
            cache,
            data=data,
            room_bytes=int(LIMIT_GB * 1e9),
            step_sequences=plan.global_batch_size,
            clock=time.monotonic,
        )
        steps = steps_from(order, Position(), plan=plan, rank=number)
        planner.reading((first := next(steps)).first_block, first.last_block)
        found: Record = {"start_s": time.perf_counter() - began}
        began = time.perf_counter()
        for step in itertools.islice(steps, STEPS):
            planner.trained()
            planner.training_on(step.first_block)
            planner.reading(step.first_block, step.last_block)
        found["step_ms"] = 1000 * (time.perf_counter() - began) / STEPS
        found["planned_gb"] = sum(map(cache.local_bytes, cache.shards)) / 1e9
        cache.close()
        began, at = time.perf_counter(), Position(2, int(0.6 * order.sequences_per_epoch))
        next(steps_from(_order(manifest), at, plan=plan, rank=number))
        found["resume_s"] = time.perf_counter() - began
    return found | {"memory_mib": _memory_mib() - before}


def all_ranks() -> Record:
    """Take every rank's share of some steps, and compare them with the stream's sequences."""
    order, plan = _order(_manifest(TOKENS // SHARD_TOKENS)), BatchPlan(MICRO, 1, RANKS, LENGTH)
    began, cpu, steps = time.perf_counter(), time.process_time(), 4
    start, taken = int(0.6 * order.sequences_per_epoch), []
    for number in range(RANKS):
        shares = steps_from(order, order.position_at(start), plan=plan, rank=number)
        taken += [_keys(share).ravel() for share in itertools.islice(shares, steps)]
    wanted = _keys(order.locate(start + np.arange(steps * plan.global_batch_size)))
    if not np.array_equal(np.sort(np.concatenate(taken)), np.sort(wanted)):
        raise SystemExit("The shares of the ranks are not the stream's sequences")
    return {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def many_shards(bucket: Bucket) -> int:
    """List, load and verify a manifest, as a run's start does; return its shards."""
    data = DataConfig(source=bucket.url)
    return len(describe_run({"": bucket}, data).shards)


def marked_checkpoints(bucket: Bucket) -> int:
    """List names, sizes and marks; return how many are committed."""
    listed = RemoteCheckpoints(bucket, STEPS_BELOW).scan()
    return sum(COMMITTED in objects for objects in listed.values())


def whole_checkpoints(bucket: Bucket) -> int:
    """List as the command does, with every manifest; return how many are whole."""
    entries = Catalog(Path("/nonexistent"), bucket, STEPS_BELOW).entries()
    return sum(one.usable and one.loss is not None for one in entries)


def on_store(act: Callable[[Bucket], int], below: str, wanted: int) -> Record:
    """Time an act on the store, and check the number that it returns."""
    store, before = os.environ["STORAGE_EMULATOR_HOST"], _memory_mib()
    requests_to(store)
    wall, cpu = time.perf_counter(), time.process_time()
    found = act(open_bucket(f"gs://{BUCKET}{below}"))
    record = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    if found != wanted:
        raise SystemExit(f"{found:,} of {wanted:,}")
    record["requests"] = requests_to(store, "answers")
    return record | {"memory_mib": _memory_mib() - before}


CASES: dict[str, Callable[[], Record]] = {
    **{f"order, rank {one}": partial(rank, one) for one in (0, 511, 1023)},
    "order, all ranks, 4 steps": all_ranks,
    "manifest of 100,000 shards": partial(on_store, many_shards, "/many", MANY_SHARDS),
    "1,000 checkpoints, marks": partial(on_store, marked_checkpoints, "", CHECKPOINTS),
    "1,000 checkpoints, whole": partial(on_store, whole_checkpoints, "", CHECKPOINTS),
}


def _keys(found: StepSequences | Located) -> NDArray[np.int64]:
    return found.shards * 2**32 + found.sequences


def _manifest(shards: int) -> Manifest:
    size = 2 * SHARD_TOKENS + 128
    names = (f"shard_{number:06d}.npy" for number in range(shards))
    rows = (Shard(name, SHARD_TOKENS, "uint16", size, 0, "1") for name in names)
    return Manifest(tuple(rows), "gpt2")


def _order(manifest: Manifest) -> Order:
    train = split_sequences(manifest, sequence_length=LENGTH, validation_fraction=0.0001).train
    return Order(train, seed=1337, block_shards=16)


def _memory_mib() -> float:
    text = Path("/proc/self/status").read_text()  # the peak of this program alone
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


def _shards_on_paper() -> dict[str, tuple[int, str | None]]:
    manifest = _manifest(MANY_SHARDS)
    text = manifest_to_json(manifest)
    shards = {f"many/{shard.name}": (shard.size, None) for shard in manifest.shards}
    return {"many/manifest.json": (len(text), text), **shards}


def _steps_on_paper() -> dict[str, tuple[int, str | None]]:
    files = {f"zero/global/rank_{number:02d}.pt": 10**9 for number in range(FILES)}
    objects: dict[str, tuple[int, str | None]] = {}
    for step in range(100, 100 * (CHECKPOINTS + 1), 100):
        name = f"checkpoint_step_{step}"
        manifest = CheckpointManifest.model_validate(
            {
                "run": "run", "run_id": "0" * 16, "name": name, "step": step, "epoch": 0,
                "files_done": 0, "created": "2026-01-01T00:00:00Z", "world_size": 8,
                "zero_stage": 3, "dtype": "bf16", "versions": {}, "data_fingerprint": "",
                "data_order": "", "parameters": 10**9, "validation_loss": 3.0, "loss": 3.0,
                "tokens": step * 2**20,
                "files": {file: {"size": size, "crc32c": 0} for file, size in files.items()},
            }
        )  # fmt: skip
        text = manifest.to_json()
        marker = manifest.marker(google_crc32c.value(text)).to_json()
        own = {"manifest.json": text.decode(), "COMMITTED": marker.decode()}
        below = f"{STEPS_BELOW}/{name}"
        objects |= {f"{below}/{file}": (size, None) for file, size in files.items()}
        objects |= {f"{below}/{file}": (len(body), body) for file, body in own.items()}
    return objects


if __name__ == "__main__":
    main()
