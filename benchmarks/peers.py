"""Compare our step with transformers' Trainer with DeepSpeed, and with plain torch loops.

    .venv/bin/python benchmarks/peers.py [--repeats 7] [--lengths 512 2048] [--stage 1]
        [--dtype bf16] [--compiled] [--pass-tokens 2048] [--accumulation 1]

All contenders live in one process on one rank. The Trainer makes its steps, and after each one the
others make theirs, so that a slow minute of the machine meets all; the table shows the medians of
the CPU time of a step. At each length a pass has 2,048 tokens: passes of one sequence of 512
compare little but products and what each update costs (`--pass-tokens 512 --accumulation 2`).
`--compiled` adds ours and a torch loop with compiled blocks.
`products` is the share of the Trainer's steps that its matrix products and attention take, by the
profiler: what everybody computes with the same kernels, and so the floor of `of the Trainer's`
where passes are the same. accelerate, which the Trainer needs, goes into an environment of its own.
"""

import argparse
import json
import sys
import tempfile
from collections import deque
from pathlib import Path

import torch
from measuring import (
    WORK,
    Case,
    Column,
    Record,
    environment,
    measure,
    medians,
    parser_of,
    table,
    write_report,
)
from step_contenders import (
    WARM_STEPS,
    Clock,
    Setup,
    Step,
    alone,
    bare_deepspeed,
    bare_torch,
    ours,
    trainer,
)

from refocused.config.optimization import PrecisionConfig

ACCELERATE = "accelerate==1.15.0"
PROFILED_STEPS = 3
TRAINER, OURS = "Trainer + DeepSpeed", "ours"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_scaled_dot_product")
COLUMNS = (
    Column("cpu_ms", "CPU ms a step", "{:,.1f}"),
    Column("of_trainer", "of the Trainer's", "{:.2f}"),
)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = parser_of(__file__, __doc__, repeats=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--stage", type=int, default=1, choices=(0, 1, 2, 3))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--pass-tokens", type=int, default=2048)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--length-alone", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.length_alone:
        records, products = steps_in_turns(chosen)
        print(json.dumps({"records": records, "products": products}))
        return
    python = environment(WORK / "accelerate", ACCELERATE)
    if python is None:
        raise SystemExit("the Trainer needs accelerate")
    results: Record = {}
    for length in chosen.lengths:
        command = [__file__, *sys.argv[1:], "--length-alone", str(length)]
        found = measure([Case(f"T {length}", command, python)], repeats=1, timeout_s=3000)
        records, products = (found[f"T {length}"][0][key] for key in ("records", "products"))
        setup = _setup(chosen, length)
        title = (
            f"{setup.micro_batch_size} x {length} x {setup.gradient_accumulation_steps}, "
            f"{chosen.dtype}, ZeRO-{chosen.stage}, median of {len(records)}"
        )
        rows = compared(records) | {"products (the floor)": {"of_trainer": products}}
        print(table(rows, COLUMNS, title=title))
        results[title] = {"records": records, "products": products}
    write_report(chosen, results)


def _setup(chosen: argparse.Namespace, length: int) -> Setup:
    """Return a model and its step: passes of so many tokens, or of one longer sequence."""
    return Setup(
        4,
        256,
        8192,
        length=length,
        micro_batch_size=max(1, chosen.pass_tokens // length),
        gradient_accumulation_steps=chosen.accumulation,
        precision=PrecisionConfig(dtype=chosen.dtype),
    )


def steps_in_turns(chosen: argparse.Namespace) -> tuple[list[Record], float]:
    """Run the others after each step of the Trainer, in a different order each time.

    Returns:
        The milliseconds by contender, and the share of products in the Trainer's last steps.
    """
    setup, world = _setup(chosen, chosen.length_alone), alone()
    others: dict[str, Step] = {
        OURS: ours(setup, chosen.stage, world),
        "our model, DeepSpeed's loop": bare_deepspeed(setup, chosen.stage, world),
        "our model, torch loop": bare_torch(setup),
    }
    if chosen.compiled:
        others["ours, compiled"] = ours(setup, chosen.stage, world, compiled="on")
        others["torch loop, compiled"] = bare_torch(setup, compiled="blocks")
    records: list[Record] = []
    turns, clock, profile = deque(others.items()), Clock(), torch.profiler.profile()

    def after_step(trainer_ms: float) -> None:
        if len(records) < WARM_STEPS + chosen.repeats:
            records.append({TRAINER: trainer_ms} | {n: clock.timed_ms(one) for n, one in turns})
            turns.rotate(1)
            if len(records) == WARM_STEPS + chosen.repeats:
                profile.start()

    with tempfile.TemporaryDirectory() as folder:
        trainer(
            setup,
            chosen.stage,
            steps=WARM_STEPS + chosen.repeats + PROFILED_STEPS,
            folder=Path(folder),
            clock=Clock(),
            after_step=after_step,
        )
    profile.stop()
    return records[WARM_STEPS:], share_of_products(profile)


def share_of_products(profile: torch.profiler.profile) -> float:
    """Return the share of matrix products and attention in the profiled time."""
    spent: dict[str, float] = {
        event.key: event.self_cpu_time_total for event in profile.key_averages()
    }
    return sum(spent[name] for name in spent if name.startswith(PRODUCTS)) / sum(spent.values())


def compared(records: list[Record]) -> dict[str, Record]:
    """Return a row for each contender."""
    return {
        name: {
            "cpu_ms": medians(records)[name],
            "of_trainer": medians([{"x": one[name] / one[TRAINER]} for one in records])["x"],
        }
        for name in records[0]
    }


if __name__ == "__main__":
    main()
