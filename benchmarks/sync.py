"""Getting 16 shards of 12.5 MB out of a store: our tools beside the others, in one run.

    .venv/bin/python benchmarks/sync.py [--repeats 5] [--json FILE]

The store is shaped: 30 ms before each answer, 20 MB/s for each stream. Then the data wait of a
training-like loop on a link 1.5 times as fast as it needs, and how much of each object is asked for
when eight ranks read on one node.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import ROOT, Case, Column, Record, environment, measure, medians, table, write_report
from shaped_store import Shape, asked_for, shaped_store
from sync_cases import CASES, RANKS, STEP_SECONDS, STEP_WINDOWS, WORK
from token_samples import SEQUENCE_LENGTH, npy_folder

LINK_ABOVE_NEED = 1.5
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
    Column("least", "least of one asked", "{:.3f}"),
    Column("most", "most", "{:.3f}"),
    Column("gets", "requests", "{:.0f}"),
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
    print(table({f"{RANKS} ranks": node}, NODE_COLUMNS, title="Each object's bytes, by a node"))
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
    """Let eight ranks of one node read every shard through one cache; count what they ask for."""
    asked_for(store)
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
    asked = asked_for(store).values()
    return {
        "objects": len(asked),
        "least": min(one.share for one in asked),
        "most": max(one.share for one in asked),
        "gets": sum(one.requests for one in asked),
        "wall_s": time.perf_counter() - began,
    }


if __name__ == "__main__":
    main()
