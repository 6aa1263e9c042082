"""Measure the host's cost of page faults and AdamW in a step.

    .venv/bin/python benchmarks/step_host.py [--cases demo offload large adamw] [--repeats 2]
        [--steps 4]

First the same steps on two CPU ranks (ZeRO-3, float32), in turns with freed memory returned to the
kernel, as the C library does, and kept, as a run does: the demonstration's model, 82 M parameters,
the same with its optimizer's states offloaded, and 0.25 B. The table shows the CPU time of a step
after the first two and the most memory of rank 0. Then DeepSpeed's CPU Adam over torch's fused
AdamW, on one rank's half of 0.25 B parameters, and how many of 100,000 elements differ after a
resume, as it is and with the bias correction put into the settings of each step. It needs a
compiler, and is left out without one.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, Case, Column, Record, measure, medians, parser_of, table, write_report

sys.path.insert(0, str(ROOT / "tests"))

SETUPS: dict[str, dict[str, Any]] = {
    "demo": {"layers": 4, "width": 192, "vocabulary": 320, "length": 256, "micro_batch_size": 4},
    "small": {
        "layers": 2,
        "width": 1536,
        "vocabulary": 16384,
        "length": 128,
        "micro_batch_size": 1,
    },
    "large": {
        "layers": 6,
        "width": 1536,
        "vocabulary": 50304,
        "length": 128,
        "micro_batch_size": 1,
    },
}
SETUPS["offload"] = SETUPS["small"] | {"offload": "cpu"}
WARM_STEPS = 2
FREED = ("returned", "kept")
ELEMENTS = 124_000_000
ADAMW = {f"adamw, {threads} threads": threads for threads in (1, 2)}
COLUMNS = (
    Column("user_seconds", "user s", "{:.3f}"),
    Column("system_seconds", "system s", "{:.3f}"),
    Column("faults", "page faults", "{:,.0f}"),
    Column("peak_mib", "peak MiB", "{:,.0f}"),
    Column("ratio", "DeepSpeed/torch", "{:.3f}"),
    Column("differ", "differ", "{:,.0f}"),
    Column("differ_folded", "differ, folded", "{:,.0f}"),
)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = parser_of(__file__, __doc__, repeats=2)
    names = [*SETUPS, "adamw"]
    parser.add_argument(
        "--cases", nargs="+", default=["demo", "offload", "large", "adamw"], choices=names
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        train(*chosen.rank.split(", "), steps=chosen.steps)
    elif chosen.case in ADAMW:
        print(json.dumps(adamw(ADAMW[chosen.case])))
    elif chosen.case is not None:
        print(json.dumps(on_two_ranks(chosen.case, steps=chosen.steps)))
    else:
        kinds = [f"{name}, {kind}" for name in chosen.cases if name in SETUPS for kind in FREED]
        kinds += ADAMW if "adamw" in chosen.cases else []
        steps = ["--steps", str(chosen.steps)]
        cases = [Case(kind, [__file__, "--case", kind, *steps]) for kind in kinds]
        found = measure(cases, repeats=chosen.repeats, timeout_s=1800)
        rows = {name: medians(records) for name, records in found.items()}
        print(table(rows, COLUMNS, title="A step on the host"))
        write_report(chosen, {**found, "rows": rows})


def on_two_ranks(case: str, *, steps: int) -> Record:
    """Return the results of rank 0 of two."""
    from ranks import Ranks

    command = [__file__, "--rank", case, "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        ended = Ranks(2, command, folder=Path(folder)).wait(1700)
    if any(ended.codes):
        raise SystemExit(ended.everything)
    record: Record = json.loads(ended.out[0].splitlines()[-1])
    return record


def train(name: str, freed: str, *, steps: int) -> None:
    """Take steps as one of the ranks, and print their cost."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from step_contenders import Setup, ours

    from refocused.estimate.memory_plan import HostPlan
    from refocused.system.world import join_world
    from refocused.train.step.garbage_collection import keep_freed_memory

    world = join_world("cpu")
    step = ours(Setup(gradient_accumulation_steps=1, **SETUPS[name]), 3, world)
    if freed == "kept":
        without_bound = HostPlan(0, 0, 0, 0, temporaries=1)
        keep_freed_memory(without_bound, available=2**40, ranks_here=1, environment={})
    for _ in range(WARM_STEPS):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(steps):
        step()
    after = resource.getrusage(resource.RUSAGE_SELF)
    record = {
        "user_seconds": (after.ru_utime - before.ru_utime) / steps,
        "system_seconds": (after.ru_stime - before.ru_stime) / steps,
        "faults": (after.ru_minflt - before.ru_minflt) / steps,
        "peak_mib": after.ru_maxrss / 1024,
    }
    print(json.dumps(record), flush=True)
    world.leave()
    os._exit(0)  # as our ranks exit: destructors of gloo's threads may abort


def adamw(threads: int) -> Record:
    """Return the CPU time of DeepSpeed's CPU Adam over that of torch's fused AdamW, in turns."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.set_num_threads(threads)
    gradient = torch.randn(ELEMENTS)
    parameters = [torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = gradient
    optimizers = (
        torch.optim.AdamW(parameters[:1], weight_decay=0.1, fused=True),
        DeepSpeedCPUAdam(parameters[1:], weight_decay=0.1),
    )
    seconds: list[list[float]] = [[], []]
    for _ in range(7):
        for optimizer, times in zip(optimizers, seconds, strict=True):
            began = time.process_time()
            optimizer.step()
            times.append(time.process_time() - began)
    torchs, deepspeeds = (min(times[1:]) for times in seconds)
    return {
        "ratio": deepspeeds / torchs,
        "differ": differing(is_folded=False),
        "differ_folded": differing(is_folded=True),
        "torch_seconds": torchs,
        "deepspeed_seconds": deepspeeds,
    }


def differing(*, is_folded: bool) -> int:
    """Return how many weights differ when DeepSpeed's CPU Adam is resumed after 5 of 30 steps."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(100_000, generator=draw) for _ in range(30)]

    def trained(resumed_at: int | None) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.ones(100_000))
        optimizer = DeepSpeedCPUAdam([parameter], bias_correction=not is_folded)
        for step, parameter.grad in enumerate(gradients, start=1):
            if is_folded:
                first, second = (1 - beta**step for beta in optimizer.defaults["betas"])
                group = optimizer.param_groups[0]
                group |= {"lr": 1e-3 * second**0.5 / first, "eps": 1e-8 * second**0.5}
            optimizer.step()
            if step == resumed_at:
                state = optimizer.state_dict()
                optimizer = DeepSpeedCPUAdam([parameter], bias_correction=not is_folded)
                optimizer.load_state_dict(state)
        return parameter.detach()

    return int((trained(5) != trained(None)).sum())


if __name__ == "__main__":
    main()
