"""What a step of a 1B model takes on one GPU: ours in its variants, and what people use.

    python benchmarks/step_gpu.py [--presets gpt2_1b neox_1_2b_true] [--only TEXT] [--repeats 7]

One process for each case, for memory's sake; in it, the matrix products of the GPU are timed first
and then steps, both by events in its queue. MFU is by the convention of `refocused.estimate.work`,
as a share of the data sheet's bf16 peak and of the rate just measured, in 8 bits too. From the
fastest case of ours follows a prediction for eight GPUs, which is no measurement.

`--tiny` goes through the same code on a CPU, with its clock and small numbers, to see that it runs.
It has been run so, and not on a GPU yet.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from clocks import clock_of, timed_ms
from measuring import Case, Column, Record, environment, measure, table, write_report
from peers import ACCELERATE, WORK
from step import WARM_STEPS, alone
from step_contenders import Setup, bare_deepspeed, bare_torch, ours, trainer

from refocused.config.files import REPOSITORY_CONFIG
from refocused.config.optimization import PrecisionConfig
from refocused.config.shape import ModelShape, load_shape
from refocused.estimate.work import flops_per_token, mfu_fraction
from refocused.hardware import gpu_facts
from refocused.world import World

KEPT_BY_EIGHT = 0.95  # of eight times one GPU's speed; assumed, for what ranks exchange
PREDICTED_TOKENS, PREDICTED_STEPS = 512 * 2048, 100_000
PRODUCT_SIDE = 8192
COLUMNS = (
    Column("step_ms", "step, ms", "{:,.1f}"),
    Column("tokens_per_second", "tokens/s", "{:,.0f}"),
    Column("mfu", "MFU", "{:.1%}"),
    Column("of_products", "of measured products", "{:.1%}"),
    Column("peak_gib", "peak GiB", "{:.1f}"),
)


@dataclasses.dataclass(frozen=True)
class Contest:
    """One row: who trains what, and how. The fields are `Setup`'s and those of a run file."""

    who: Literal["ours", "torch", "deepspeed", "trainer"] = "ours"
    stage: Literal[0, 1, 2, 3] = 1
    micro: int = 4
    compiled: bool = True
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    checkpointing: bool = False
    offload: Literal["none", "cpu"] = "none"


CONTESTS = {
    "ours": Contest(),
    "ours, ZeRO-3": Contest(stage=3),
    "ours, not compiled": Contest(compiled=False),
    "ours, fp8 tensorwise": Contest(fp8="tensorwise"),
    "ours, fp8 rowwise": Contest(fp8="rowwise"),
    "torch loop, compiled": Contest("torch"),
    "DeepSpeed's loop": Contest("deepspeed", compiled=False),
    "Trainer + DeepSpeed": Contest("trainer", compiled=False),
    "Trainer + ZeRO-3 + offload": Contest("trainer", stage=3, compiled=False, offload="cpu"),
    **{f"ours, micro {micro}": Contest(micro=micro) for micro in (1, 2, 8, 16)},
    "ours, checkpointing, micro 16": Contest(micro=16, checkpointing=True),
    "ours, offload": Contest(offload="cpu"),
}


def main() -> None:
    """Measure, print the tables, write everything down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["gpt2_1b", "neox_1_2b_true"])
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--per-hour-usd", type=float, help="of eight GPUs, for the prediction")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, default=WORK / "step_gpu.json")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        preset, name = chosen.alone
        print(json.dumps(measured(preset, CONTESTS[name], chosen)), flush=True)
        os._exit(0)  # gloo's threads abort an ordinary end now and then
    python = environment(WORK / "accelerate", whole=[ACCELERATE])
    results: dict[str, Any] = {}
    for preset in ["gpt2_tiny"] if chosen.tiny else chosen.presets:
        rows = rows_of(preset, chosen, python)
        print(table(rows, COLUMNS, title=f"{preset}, one GPU, median of {chosen.repeats} steps"))
        print(prediction(rows, per_hour_usd=chosen.per_hour_usd))
        results[preset] = rows
    write_report(chosen.json, settings=vars(chosen) | {"json": str(chosen.json)}, results=results)


def rows_of(preset: str, chosen: argparse.Namespace, python: str | None) -> dict[str, Record]:
    """Let each case measure itself; without accelerate, those of the Trainer are left out."""
    passed = ["--repeats", str(chosen.repeats), "--accumulation", str(chosen.accumulation)]
    passed += ["--tiny"] if chosen.tiny else []
    names = [name for name in CONTESTS if chosen.only in name]
    cases = [
        Case(name, [__file__, *passed, "--alone", preset, name], python)
        for name in names
        if python is not None
    ]
    if python is None:
        ours_alone = [name for name in names if CONTESTS[name].who != "trainer"]
        cases = [Case(name, [__file__, *passed, "--alone", preset, name]) for name in ours_alone]
    return {name: found[0] for name, found in measure(cases, repeats=1, timeout_s=900).items()}


def measured(preset: str, contest: Contest, chosen: argparse.Namespace) -> Record:
    """Measure one case in this process."""
    world = alone("cpu" if chosen.tiny else "cuda")
    shape = load_shape(REPOSITORY_CONFIG / "models" / f"{preset}.json")
    setup = setup_of(shape, contest, chosen)
    products = product_flops(world, side=256 if chosen.tiny else PRODUCT_SIDE)
    times = step_times(setup, contest, world, repeats=chosen.repeats)
    return figures(times, setup, shape, world, products=products)


def setup_of(shape: ModelShape, contest: Contest, chosen: argparse.Namespace) -> Setup:
    """Return what a case trains: the whole model, or a small one on a CPU."""
    return Setup(
        layers=shape.layers,
        width=shape.width,
        vocabulary=shape.padded_vocabulary(128),
        length=min(shape.max_length, 32 if chosen.tiny else 2048),
        micro=min(contest.micro, 2) if chosen.tiny else contest.micro,
        accumulation=chosen.accumulation,
        given=shape.settings,
        precision=PrecisionConfig(dtype="bf16", fp8=contest.fp8),
        checkpointing=contest.checkpointing,
        offload=contest.offload,
        chunk_tokens=64 if chosen.tiny else 2048,
    )


def product_flops(world: World, *, side: int) -> float:
    """Return the FLOP/s of square bf16 products, the median of twenty."""
    left, right = (
        torch.randn(side, side, device=world.device, dtype=torch.bfloat16) for _ in range(2)
    )
    clock = clock_of(world.device)
    times = [timed_ms(clock, lambda: left @ right) for _ in range(25)][5:]
    return 2.0 * side**3 / statistics.median(times) * 1000


def step_times(setup: Setup, contest: Contest, world: World, *, repeats: int) -> list[float]:
    """Return the milliseconds of steps, after those that warm up."""
    clock = clock_of(world.device)
    if contest.who == "trainer":
        times: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            trainer(
                setup,
                contest.stage,
                steps=WARM_STEPS + repeats,
                folder=Path(folder),
                clock=clock,
                after_step=times.append,
            )
        return times[WARM_STEPS:]
    is_compiled = contest.compiled and world.device_kind == "cuda"
    if contest.who == "torch":
        step = bare_torch(setup, compiled=is_compiled, device=world.device)
    elif contest.who == "deepspeed":
        step = bare_deepspeed(setup, contest.stage, world)
    else:
        step = ours(setup, contest.stage, world, compiled="on" if is_compiled else "off")
    for _ in range(WARM_STEPS):
        step()
    return [timed_ms(clock, step) for _ in range(repeats)]


def figures(
    times: list[float], setup: Setup, shape: ModelShape, world: World, *, products: float
) -> Record:
    """Return a row of the table."""
    step_ms, on_gpu = statistics.median(times), world.device_kind == "cuda"
    tokens = setup.micro * setup.length * setup.accumulation
    speed, flops = tokens / step_ms * 1000, flops_per_token(shape, sequence_length=setup.length)
    facts = gpu_facts(world.device_name) if on_gpu else None
    peak = facts.bf16_flops if facts else None
    return {
        "step_ms": step_ms,
        "tokens_per_second": speed,
        "mfu": mfu_fraction(speed, flops_per_token=flops, gpus=1, peak_flops=peak),
        "of_products": speed * flops / products,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "device": world.device_name,
        "all_ms": times,
    }


def prediction(rows: dict[str, Record], *, per_hour_usd: float | None) -> str:
    """Say what eight GPUs would make of the fastest case of ours, and that nobody saw it."""
    of_ours = {name: row for name, row in rows.items() if CONTESTS[name].who == "ours"}
    if not of_ours:
        return ""
    name, row = max(of_ours.items(), key=lambda item: item[1]["tokens_per_second"])
    an_hour = row["tokens_per_second"] * 8 * KEPT_BY_EIGHT * 3600 / PREDICTED_TOKENS
    hours = PREDICTED_STEPS / an_hour
    cost = f", {hours * per_hour_usd:,.0f} USD" if per_hour_usd is not None else ""
    return (
        f"PREDICTION, not measured: 8 such GPUs by '{name}', {KEPT_BY_EIGHT:.0%} of 8 times one "
        f"(assumed): {an_hour:,.0f} steps of 512 x 2048 an hour, {PREDICTED_STEPS:,} in "
        f"{hours:,.1f} h{cost}"
    )


if __name__ == "__main__":
    main()
