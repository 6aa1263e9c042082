"""What a step of ours costs beside a bare DeepSpeed loop and a bare torch loop.

    python benchmarks/step.py [--repeats 7] [--stages 0 1 3] [--setups narrow 512 2048]

All contenders live in one process on one rank and take their steps in turns; the table shows the
medians of the CPU time of a step. `over torch` is what each costs above the bare torch loop, for
one micro-batch. `narrow` is a 24-layer model so small that the host's work is all there is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch
from clocks import CpuClock, timed_ms
from measuring import ROOT, Column, Record, medians, say, table, write_report
from step_contenders import Setup, Step, bare_deepspeed, bare_torch, ours

from refocused.system.world import World, join_world

sys.path.insert(0, str(ROOT / "tests"))

WARM_STEPS = 2
SETUPS = {
    "narrow": Setup(layers=24, width=64, vocabulary=512, length=16, micro=1, accumulation=4),
    "512": Setup(layers=4, width=256, vocabulary=2048, length=512, micro=1, accumulation=2),
    "2048": Setup(layers=4, width=256, vocabulary=2048, length=2048, micro=1, accumulation=1),
}
COLUMNS = (
    Column("torch", "torch, ms", "{:,.1f}"),
    Column("DeepSpeed", "DeepSpeed, ms", "{:,.1f}"),
    Column("ours", "ours, ms", "{:,.1f}"),
    Column("ratio", "ours/DeepSpeed", "{:.3f}"),
    Column("deepspeed_over", "DeepSpeed over torch", "{:+.2f}"),
    Column("ours_over", "ours over torch", "{:+.2f}"),
    Column("over_ratio", "ratio", "{:.2f}"),
)


def main() -> None:
    """Measure, print the table, write everything down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--setups", nargs="+", default=list(SETUPS), choices=list(SETUPS))
    parser.add_argument("--json", type=Path, default=Path("/tmp/refocused-benchmarks/step.json"))
    chosen = parser.parse_args()
    world = alone()
    rows: dict[str, Record] = {}
    found: dict[str, list[Record]] = {}
    for name in chosen.setups:
        for stage in chosen.stages:
            say(f"{name}, ZeRO-{stage}")
            title = f"{SETUPS[name].name}, ZeRO-{stage}"
            found[title] = measure(SETUPS[name], stage, world, repeats=chosen.repeats)
            rows[title] = compared(found[title], SETUPS[name].accumulation)
    print(table(rows, COLUMNS, title=f"CPU time of a step, median of {chosen.repeats}"))
    write_report(chosen.json, settings={"repeats": chosen.repeats}, results={**found, "rows": rows})


def alone(device: str = "cpu") -> World:
    """Join a world of one rank, whose CPU part computes on one core."""
    from ranks import free_port

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update({**alone, **address, "DS_ACCELERATOR": device, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    return join_world(device)


def measure(setup: Setup, stage: int, world: World, *, repeats: int) -> list[Record]:
    """Return the CPU milliseconds of a step of each contender, by repeat."""
    assert stage in (0, 1, 2, 3)
    contenders: dict[str, Step] = {
        "torch": bare_torch(setup),
        "DeepSpeed": bare_deepspeed(setup, stage, world),  # type: ignore[arg-type]
        "ours": ours(setup, stage, world),  # type: ignore[arg-type]
    }
    return in_turns(contenders, repeats=repeats)


def in_turns(contenders: Mapping[str, Step], *, repeats: int) -> list[Record]:
    """Let each make a step, again and again; return their CPU milliseconds.

    Whoever is first finds the caches as the last one left them: each repeat begins with another.
    """
    for step in contenders.values():
        for _ in range(WARM_STEPS):
            step()
    turns, records, clock = deque(contenders.items()), [], CpuClock()
    for _ in range(repeats):
        records.append({name: timed_ms(clock, step) for name, step in turns})
        turns.rotate(1)
    return records


def compared(records: list[Record], accumulation: int) -> Record:
    """Return the medians, and what they say."""
    row = medians(records)
    for name in ("DeepSpeed", "ours"):
        above = [(record[name] - record["torch"]) / accumulation for record in records]
        row[f"{name.lower()}_over"] = medians([{"ms": ms} for ms in above])["ms"]
    row["ratio"] = medians([{"x": r["ours"] / r["DeepSpeed"]} for r in records])["x"]
    row["over_ratio"] = row["ours_over"] / row["deepspeed_over"]
    return row


if __name__ == "__main__":
    main()
