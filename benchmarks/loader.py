"""Compare our loader with others on batches of 8 x 2048 from 200 MB of tokens, in one run.

    .venv/bin/python benchmarks/loader.py [--repeats 5] [--json FILE]

torchdata is installed into an environment of its own in the working folder.
"""

import argparse
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path

from measuring import (
    WORK,
    Case,
    Column,
    Record,
    cpu_seconds,
    environment,
    measure,
    medians,
    parser_of,
    private_mib,
    seconds,
    table,
    write_report,
)

EPOCHS, LONGEST_S = 7, 12.0
COLUMNS = (
    Column("tokens_per_second", "M tokens/s", scale=1e-6),
    Column("tokens_per_cpu_second", "per CPU-s", scale=1e-6),
    Column("first_batch_s", "first batch, ms", scale=1e3),
    Column("private_mib", "private, MiB"),
    Column("growth_mib", "growth after 1st epoch, MiB"),
    Column("resume_s", "resume, ms", scale=1e3),
)
RATES = ("tokens_per_second", "tokens_per_cpu_second")


def main() -> None:
    """Measure all cases, or the one that `--case` names."""
    parser = parser_of(__file__, __doc__, repeats=5)
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--only", default="", help="measure the cases whose name holds this text")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(measure_loader(chosen.case, chosen.work)))
    else:
        compare(chosen)


def compare(chosen: argparse.Namespace) -> None:
    """Run the cases in turns, print the tables, and write the JSON."""
    cases = [case for case in _cases(chosen) if chosen.only in case.name]
    for case in cases:  # creates the files, which takes much longer than reading them
        if not (chosen.work / "prepared" / case.name).exists():
            measure([case], repeats=1, timeout_s=900)
            (chosen.work / "prepared").mkdir(parents=True, exist_ok=True)
            (chosen.work / "prepared" / case.name).touch()
    records = measure(cases, repeats=chosen.repeats, timeout_s=180)
    rows = {name: medians(found) for name, found in records.items()}
    print(table(rows, COLUMNS, title=f"Batches of 8 x 2048, medians of {chosen.repeats}"))
    if "ours, .npy" in rows:
        ours = rows["ours, .npy"]
        ratios = {name: {key: row[key] / ours[key] for key in RATES} for name, row in rows.items()}
        columns = [Column(key, key.replace("_", " "), "{:.2f}") for key in RATES]
        print(table(ratios, columns, title="The same, ours = 1"))
    write_report(chosen, records)


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
        cpu, wall = cpu_began, began  # count what was fetched and converted before
    else:
        cpu, wall = cpu_seconds(), time.perf_counter()
    steps = STEPS_OF_EPOCH * (1 if name == "ours, first pass of .npz" else EPOCHS) - 2
    first_epoch = None
    for step in itertools.count(1):
        next(batches)
        if step == STEPS_OF_EPOCH:
            looked, cpu_looked = time.perf_counter(), cpu_seconds()
            first_epoch = private_mib(work)
            wall += time.perf_counter() - looked  # time of the memory measurement
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


def _cases(chosen: argparse.Namespace) -> list[Case]:
    from loader_cases import CASES

    torchdata = environment(chosen.work / "torchdata", "--no-deps", "torchdata")
    pythons: dict[str, str | None] = dict.fromkeys(CASES, sys.executable)
    pythons |= {"torchdata StatefulDataLoader": torchdata}
    command = [__file__, "--work", str(chosen.work), "--case"]
    return [Case(name, [*command, name], python) for name, python in pythons.items() if python]


if __name__ == "__main__":
    main()
