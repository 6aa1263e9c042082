"""Measure what it costs to time the phases of steps, and record such times.

    .venv/bin/python benchmarks/stragglers.py [--steps 100] [--record FILE.json]

The demonstration's steps on two CPU ranks under ZeRO-3, every second one of which is marked.
Printed is the CPU time of a marked step over that of the one before it, a median; a run marks every
fourth step. `--record` takes smaller steps, and writes the work of both ranks in microseconds of
CPU time, sums of five marked steps, for the tests: the jitter of processor and memory, without the
pauses of a shared machine.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from measuring import ROOT, parser_of, write_report

sys.path.insert(0, str(ROOT / "tests"))

WARM_STEPS, SUMMED = 6, 5


def main() -> None:
    """Measure, print the figures, write the JSON."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        train(chosen.steps, records=chosen.record is not None)
    from ranks import Ranks

    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(__file__).resolve()), *sys.argv[1:], "--rank"]
        ended = Ranks(2, command, folder=Path(folder)).wait(1700)
    if any(ended.codes):
        raise SystemExit(ended.everything)
    found = json.loads(ended.out[0].splitlines()[-1])
    work = found.pop("work")
    if chosen.record:
        chosen.record.write_text(json.dumps(work, separators=(",", ":")) + "\n")
    print("\n".join(f"{name:<16}{value:9.4f}" for name, value in found.items()))
    write_report(chosen, found)


def train(steps: int, *, records: bool) -> None:
    """Take steps as one of the ranks; rank 0 prints what they cost."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from step_contenders import OPTIMIZER, Setup, engine_of

    from refocused.metrics import rank_times, throughput
    from refocused.system.world import join_world

    throughput.MARKED_EVERY = 1 if records else 2
    setup = Setup(
        layers=4,
        width=192,
        vocabulary=320,
        length=256,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
    )
    if records:
        setup = Setup(
            layers=2,
            width=64,
            vocabulary=512,
            length=32,
            micro_batch_size=2,
            gradient_accumulation_steps=2,
        )
        clock = (time.thread_time, lambda mark, later: later - mark)
        vars(throughput)["device_clock"] = lambda *_: clock
    world = join_world("cpu")
    engine = engine_of(setup, setup.model(), 3, world)
    inputs, labels = setup.batch()
    seconds: tuple[list[float], list[float]] = ([], [])
    work: list[float] = []
    for step in range(steps + WARM_STEPS):
        began = time.thread_time()
        engine.begin_step(setup.gradient_accumulation_steps)
        for _ in range(setup.gradient_accumulation_steps):
            engine.accumulate(inputs, labels)
        engine.update(OPTIMIZER.lr)
        took, rows = time.thread_time() - began, engine.phases.take(data_seconds=0.0)
        if step >= WARM_STEPS:
            seconds[len(rows)].append(took)
            work += [sum(row[: len(rank_times.OWN)]) for row in rows]
    unmarked = statistics.median(seconds[0] or [1.0])
    more = statistics.median([0.0] if records else [b - a for a, b in zip(*seconds, strict=True)])
    sums = torch.tensor(work)[: len(work) // SUMMED * SUMMED].view(-1, SUMMED).sum(1) * 1e6
    of_ranks = world.gather([round(one) for one in sums.tolist()])
    figures = {"step_ms": 1000 * unmarked, "marked/unmarked": 1 + more / unmarked}
    if world.is_rank_0:
        print(json.dumps({**figures, "work": list(zip(*of_ranks, strict=True))}), flush=True)
    world.leave()
    os._exit(0)  # as our ranks exit: destructors of gloo's threads may abort


if __name__ == "__main__":
    main()
