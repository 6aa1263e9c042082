"""Batches of 8 x 2048 out of 200 MB of tokens: our loader beside the others, in one run.

    .venv/bin/python benchmarks/loader.py [--repeats 5] [--json FILE]

The floors are what any loader of these files pays on this machine: numpy's widening to int64, the
reads besides, and inflating.

litdata and torchdata are installed into an environment of their own in the working folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
from loader_floors import FLOORS
from measuring import (
    Case,
    Column,
    Record,
    cpu_seconds,
    environment,
    measure,
    medians,
    private_mib,
    seconds,
    table,
    write_report,
)

EPOCHS, LONGEST_S = 7, 12.0
LITDATA_NEEDS = ("boto3", "tifffile", "obstore")
RIVALS = ("torchdata", "litdata", "lightning-utilities")
COLUMNS = (
    Column("tokens_per_second", "M tokens/s"),
    Column("tokens_per_cpu_second", "per CPU-s"),
    Column("first_batch_s", "first batch, ms"),
    Column("private_mib", "private, MiB"),
    Column("growth_mib", "growth after 1st epoch, MiB"),
    Column("resume_s", "resume, ms"),
)
IN_MILLIONS = ("tokens_per_second", "tokens_per_cpu_second")
IN_THOUSANDTHS = ("first_batch_s", "resume_s", "construct_s", "locate_s", "assembly_s")
PARTS = (
    Column("windows", "windows", "{:,.0f}"),
    Column("construct_s", "construct, ms", "{:.2f}"),
    Column("locate_s", "64 steps of 512, ms", "{:.2f}"),
    Column("peak_mib", "all arrays, MiB", "{:.2f}"),
    Column("assembly_s", "batch 16 x 2048, ms", "{:.3f}"),
)


def main() -> None:
    """Measure all cases, or the one that `--case` names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("/tmp/refocused-benchmarks"))
    parser.add_argument("--json", type=Path, default=Path("/tmp/refocused-benchmarks/loader.json"))
    parser.add_argument("--only", default="", help="measure the cases whose name holds this text")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case == "order and assembly":
        print(json.dumps(measure_parts()))
    elif chosen.case in FLOORS:
        print(json.dumps(FLOORS[chosen.case](chosen.work)))
    elif chosen.case:
        print(json.dumps(measure_loader(chosen.case, chosen.work)))
    else:
        compare(chosen)


def compare(chosen: argparse.Namespace) -> None:
    """Run the cases in turns, print the tables, and write everything down."""
    cases = [case for case in _cases(chosen) if chosen.only in case.name]
    for case in cases:  # makes the files, which takes much longer than reading them
        if not (chosen.work / "prepared" / case.name).exists():
            measure([case], repeats=1, timeout_s=900)
            (chosen.work / "prepared").mkdir(parents=True, exist_ok=True)
            (chosen.work / "prepared" / case.name).touch()
    records = measure(cases, repeats=chosen.repeats, timeout_s=180)
    rows = {name: _scaled(medians(found)) for name, found in records.items()}
    parts = {name: rows.pop(name) for name in list(rows) if name == "order and assembly"}
    print(table(rows, COLUMNS, title=f"Batches of 8 x 2048, medians of {chosen.repeats}"))
    if "ours, .npy" in rows:
        print(table(_ratios(rows), COLUMNS[:2], title="The same, ours = 1"))
    print(table(parts, PARTS, title="Order of 25 million windows; assembly of one batch"))
    write_report(chosen.json, settings={"repeats": chosen.repeats}, results=records)


def measure_loader(name: str, work: Path) -> Record:
    """Read seven epochs, or as much of them as 12 s allow, then resume at a random step."""
    import torch

    torch.empty(1)
    imported = private_mib(work)
    from loader_cases import CASES, STEPS_OF_EPOCH

    case = CASES[name]
    case.prepare(work)
    began, cpu_began = time.perf_counter(), cpu_seconds()
    batches = case.open(case.state_at(0))
    next(batches)
    found: Record = {"first_batch_s": time.perf_counter() - began}
    if name == "ours, first pass of .npz":
        cpu, wall = cpu_began, began  # what was fetched and converted before it counts
    else:
        cpu, wall = cpu_seconds(), time.perf_counter()
    steps = STEPS_OF_EPOCH * (1 if name == "ours, first pass of .npz" else EPOCHS) - 2
    first_epoch = None
    for step in itertools.count(1):
        next(batches)
        if step == STEPS_OF_EPOCH:
            looked, cpu_looked = time.perf_counter(), cpu_seconds()
            first_epoch = private_mib(work)
            wall += time.perf_counter() - looked  # looking at memory is no reading
            cpu += cpu_seconds() - cpu_looked
        elapsed = time.perf_counter() - wall
        if elapsed > LONGEST_S or step >= steps:
            break
    tokens = step * 8 * 2048
    used = cpu_seconds() - cpu
    found["tokens_per_second"] = tokens / elapsed
    found["tokens_per_cpu_second"] = tokens / used
    found["epochs"] = step / STEPS_OF_EPOCH
    found["private_mib"] = private_mib(work) - imported
    found["growth_mib"] = None if first_epoch is None else private_mib(work) - first_epoch
    del batches
    draw = random.Random(int(os.environ.get("BENCHMARK_REPEAT", "0")))
    state = case.state_at(draw.randrange(1, STEPS_OF_EPOCH // 2))
    if state is not None:
        found["resume_s"] = seconds(lambda: next(case.open(state)))
    return found


def measure_parts() -> Record:
    """Time the order over 25.2 million windows, and the assembly of one batch of 16 x 2048."""
    from refocused.data.order.window_order import Order
    from refocused.data.order.windows import WindowRange

    ranges = [WindowRange(number, 0, 32_768) for number in range(769)]
    numbers = np.arange(64 * 512).reshape(64, 512)
    order = Order(ranges, seed=1, block_shards=16)
    order.locate(numbers)  # the first call of numpy's functions
    tracemalloc.start()
    Order(ranges, seed=1, block_shards=16).locate(numbers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "windows": order.windows_per_epoch,
        "construct_s": _median_of(lambda: Order(ranges, seed=1, block_shards=16)),
        "locate_s": _median_of(lambda: order.locate(numbers)),
        "peak_mib": peak / 2**20,
        "assembly_s": _assembly_s(),
    }


def _assembly_s() -> float:
    """Return the time of one batch of 16 windows of 2048 tokens out of 16 open shards."""
    import tempfile

    from refocused.data.cache.local_shards import TokenFile
    from refocused.data.loader.batch import BatchReader

    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number in range(16):
            path = Path(folder) / f"{number}.npy"
            np.save(path, draw.integers(0, 50_257, 2_000_000, dtype=np.uint16))
            files.append(TokenFile(path, name=path.name))

        class Opened:
            """The part of a cache that a reader uses."""

            vocabulary = 50_257
            names = tuple(str(number) for number in range(16))

            def open(self, index: int) -> TokenFile:
                """Return an open shard."""
                return files[index]

        reader = BatchReader(Opened(), sequence_length=2048)  # type: ignore[arg-type]
        shards = np.arange(16)[None]

        def read() -> None:
            reader.read(shards, draw.integers(0, 900, (1, 16)), micro=16).batches()

        return _median_of(read, times=500)


def _median_of(call: Callable[[], object], *, times: int = 30) -> float:
    return statistics.median(seconds(call) for _ in range(times))


def _cases(chosen: argparse.Namespace) -> list[Case]:
    from loader_cases import CASES

    beside = environment(chosen.work / "rivals", whole=LITDATA_NEEDS, alone=RIVALS)
    pythons = dict.fromkeys(("torchdata StatefulDataLoader", "litdata"), beside)
    command = [__file__, "--work", str(chosen.work), "--case"]
    cases = [Case("order and assembly", [*command, "order and assembly"])]
    for name in [*CASES, *FLOORS]:
        if name not in pythons:
            cases.append(Case(name, [*command, name]))
        elif (python := pythons[name]) is not None:
            cases.append(Case(name, [*command, name], python=python))
    return cases


def _scaled(record: Record) -> Record:
    """Write rates in millions and times in milliseconds."""
    scaled = dict(record)
    for key in record:
        if record[key] is not None and key in IN_MILLIONS:
            scaled[key] = record[key] / 1e6
        elif record[key] is not None and key in IN_THOUSANDTHS:
            scaled[key] = record[key] * 1e3
    return scaled


def _ratios(rows: dict[str, Record]) -> dict[str, Record]:
    ours = rows["ours, .npy"]
    return {name: {key: row[key] / ours[key] for key in IN_MILLIONS} for name, row in rows.items()}


if __name__ == "__main__":
    main()
