"""What a saved step costs to turn into a transformers folder: time, and memory at its peak.

    .venv/bin/python benchmarks/inference.py [--preset gpt2_124m] [--ranks 2] [--json FILE]

A real step is saved first, by ZeRO-3 on `--ranks` CPU ranks. Each case is a process of its own;
its peak is the most memory that it ever had resident (VmHWM), less what a process has that imports
the same and does nothing, in shares of the model's largest tensor in float32:

* written: the export without the comparison, in bf16;
* compared: with it, in float32, as `checkpoints export` does by itself;
* zero_to_fp32: the script that DeepSpeed leaves in a checkpoint, which writes float32.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measuring import ROOT, Case, Column, Record, measure, medians, say, table, write_report

IMPORTS = "nothing but imports"
COLUMNS = (
    Column("seconds", "seconds", "{:.1f}"),
    Column("peak_mib", "peak MiB", "{:,.0f}"),
    Column("above_mib", "above imports", "{:,.0f}"),
    Column("of_largest", "of the largest tensor", "{:.2f}"),
)


def main() -> None:
    """Save a step, measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="What an export costs.")
    parser.add_argument("--preset", default="gpt2_124m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keeps the step for the next time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(run_case(arguments.case[0], Path(arguments.case[1]))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        step = saved_step(folder, preset=arguments.preset, ranks=arguments.ranks)
        command = [str(Path(__file__)), "--case"]
        cases = [Case(name, [*command, name, str(step)]) for name in CASES]
        found = measure(cases, repeats=arguments.repeats, timeout_s=1200)
    rows = {name: medians(records) for name, records in found.items()}
    largest_mib = rows["written"]["largest_mib"]
    for row in rows.values():
        row["above_mib"] = row["peak_mib"] - rows[IMPORTS]["peak_mib"]
        row["of_largest"] = row["above_mib"] / largest_mib
    title = (
        f"{arguments.preset} saved by {arguments.ranks} ranks; its largest tensor has "
        f"{largest_mib:,.0f} MiB; median of {arguments.repeats}"
    )
    print(table(rows, COLUMNS, title=title))
    if arguments.json is not None:
        settings = {key: str(value) for key, value in vars(arguments).items() if key != "json"}
        write_report(arguments.json, settings=settings, results=rows)


def saved_step(folder: Path, *, preset: str, ranks: int) -> Path:
    """Train one step of a model and return the directory that it was saved to."""
    step = folder / "runs" / preset / "checkpoints" / "checkpoint_step_1"
    if step.is_dir():
        return step
    say(f"Saving a step of {preset}")
    (folder / "tokens").mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens" / "shard.npy", np.arange(20_000, dtype=np.uint16) % 500)
    settings = {
        "run": {"name": preset, "steps": 1, "device": "cpu"},
        "model": {"preset": preset, "sequence_length": 32},
        "batch": {"micro": 1, "accumulation": 1},
        "data": {"source": "tokens", "cache": "cache"},
        "optimizer": {"lr": 1e-4},
        "evaluation": {"windows": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(settings))
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "--config", "run.yaml"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            command,
            cwd=folder,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=sys.stderr,
        )
        for rank in range(ranks)
    ]
    codes = [process.wait() for process in started]  # all of them, also after a failure
    if any(codes):
        raise SystemExit("The step was not saved; see above.")
    return step


def run_case(name: str, step: Path) -> Record:
    """Be the process of one case."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    out = step.parents[3] / f"out-{os.getpid()}"
    began = time.perf_counter()
    largest = CASES[name](step, out)
    seconds = time.perf_counter() - began
    shutil.rmtree(out, ignore_errors=True)
    return {"seconds": seconds, "peak_mib": peak_mib(), "largest_mib": largest}


def peak_mib() -> float:
    """Return the most memory that this process ever had resident, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def import_alone(_step: Path, _out: Path) -> None:
    """Import what an export imports, its model's class among it."""
    import transformers

    import refocused.evaluate.export  # noqa: F401

    transformers.GPT2LMHeadModel, transformers.GPTNeoXForCausalLM, transformers.GenerationConfig  # noqa: B018


def export(step: Path, out: Path, *, compare: bool) -> float:
    """Export a step; return the size of its largest tensor in float32, in MiB."""
    from refocused.checkpoints.step.step_directory import read_step
    from refocused.evaluate.export import export_step
    from refocused.evaluate.model_weights import ModelWeights

    weights = ModelWeights(read_step(step))
    export_step(weights, out, tokenizer=None, compare=compare)
    return max(4 * int(np.prod(shape)) for shape in weights.shapes.values()) / 2**20


def zero_to_fp32(step: Path, out: Path) -> None:
    """Let DeepSpeed's own script write the weights; its safetensors refuse tied weights."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    convert_zero_checkpoint_to_fp32_state_dict(str(step), str(out), tag="zero")


CASES = {
    IMPORTS: import_alone,
    "written": lambda step, out: export(step, out, compare=False),
    "compared": lambda step, out: export(step, out, compare=True),
    "zero_to_fp32": zero_to_fp32,
}


if __name__ == "__main__":
    main()
