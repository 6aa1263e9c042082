"""Measure how many steps small models need to look up what a sequence says.

    .venv/bin/python benchmarks/lookup.py [--models gpt2 ten_recall] [--tasks needle] [--seeds 0]

Three tasks, with ids of their own for keys, values and noise:

* needle: a marker and, behind it, its value stand once in the first half of T tokens of noise. In
  the second half the marker comes eight times, and each time the value is to follow.
* pairs: the same with eight of 32 keys, each followed by one of 32 values; each key is asked once.
* copy: the first 16 tokens are values, and are to be repeated at the end, after noise, where each
  place has the same question; their distance is always T - 16.

A model trains until it answers the wanted share of 512 new sequences (needle 0.99, pairs 0.9 of
GPT-2 and 0.85 of the others, copy 1.00 as printed, 0.995), or until its steps are used up: GPT-2's
are `--steps`, the others have twice as many. Chance is 1/32. Each case is one line of `--results`,
written when it ends; the next call goes on with the cases that are missing, and prints all.

Models have two blocks 64 wide and, at T 512, 116 to 138 thousand parameters. *recall* adds a
convolution of 4 taps and a memory of 4 heads to a family, *hybrid* has the same in its first block
and attention in its second. Training is a plain loop with torch's AdamW in float32 on
one thread; the rate falls linearly to a tenth over the steps allowed.
"""

import argparse
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measuring import WORK, Column, Record, finished, lines_of, parser_of, say, table
from torch import Tensor

from refocused.models import recall
from refocused.models.causal_lm import CausalLM, counted_parameters
from refocused.models.families import build_model

KEYS, VALUES, NOISES, ASKED = 32, 32, 62, 8
MARKER, PLACE = KEYS + VALUES + NOISES, KEYS + VALUES + NOISES + 1  # the two questions
VOCABULARY = PLACE + 1
COPIED = 16
ROWS, JUDGED_ROWS, REPORT_STEPS, WARMUP_STEPS = 8, 64, 50, 50
WANTED = {"needle": 0.99, "pairs": 0.85, "copy": 0.995}
WANTED_OF_GPT2 = WANTED | {"pairs": 0.9}
WIDTH = 64
COMMON: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 2}
RECALL = {"convolution_width": 4, "memory_heads": 4}
HYBRID = RECALL | {"attention_every": 2, "attention_heads": 4}
TEN = COMMON | {"model_type": "ten", "num_eigenstates": 32, "chunk_size": 32}
RESONANCE = COMMON | {"model_type": "resonance", "num_resonators": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_inner": 224},
    "ten_recall": TEN | {"intermediate_size": 80},
    "ten_hybrid": TEN | {"intermediate_size": 144},
    "resonance_recall": RESONANCE | {"intermediate_size": 32},
    "resonance_hybrid": RESONANCE | {"intermediate_size": 144},
}
for _name, _shape in SHAPES.items():
    _shape |= {"_recall": RECALL, "_hybrid": HYBRID}.get(f"_{_name.rpartition('_')[2]}", {})
COLUMNS = (
    Column("parameters", "parameters", "{:,.0f}"),
    Column("seeds", "seeds", "{:.0f}"),
    Column("reached", "reached", "{:.0f}"),
    Column("steps", "steps (median)", "{:,.0f}"),
    Column("least", "worst accuracy", "{:.3f}"),
    Column("cpu_seconds", "CPU s", "{:,.0f}"),
)


def main() -> None:
    """Train what is missing, and print the table of all results."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tasks", nargs="+", default=list(WANTED), choices=WANTED)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1500, help="of GPT-2; twice for the others")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--results", type=Path, default=WORK / "lookup.jsonl")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recall.MEMORY_CHUNK = 32  # as fast as 128 is for wide models; the results are the same
    for seed in arguments.seeds:
        for task in arguments.tasks:
            for model in arguments.models:
                case = {**case_of(arguments, model, task), "seed": seed}
                finished(arguments.results, case, functools.partial(learn, case))
    for task in arguments.tasks:
        show(task, arguments)


def case_of(arguments: argparse.Namespace, model: str, task: str) -> Record:
    """Return a training; GPT-2 is given half of the steps of the others."""
    steps = arguments.steps * (1 if model.startswith("gpt") else 2)
    settings = {"length": arguments.length, "lr": arguments.lr, "allowed_steps": steps}
    return {"model": model, "task": task, **settings}


def show(task: str, arguments: argparse.Namespace) -> None:
    """Print the table of a task at one length."""
    rows: dict[str, Record] = {}
    for model in arguments.models:
        case = case_of(arguments, model, task)
        done = [one for one in lines_of(arguments.results) if case.items() <= one.items()]
        if done:
            rows[model] = {
                "parameters": done[0]["parameters"],
                "seeds": len(done),
                "reached": sum(one["reached"] for one in done),
                "steps": statistics.median(one["steps"] for one in done),
                "least": min(one["accuracy"] for one in done),
                "cpu_seconds": statistics.median(one["cpu_seconds"] for one in done),
            }
    print(
        table(rows, COLUMNS, title=f"{task} at T {arguments.length:,}; chance is {1 / VALUES:.3f}")
    )


def learn(case: Record) -> Record:
    """Train a new model until it answers well enough; return its figures."""
    length, steps, task = case["length"], case["allowed_steps"], case["task"]
    positions = {"n_positions" if case["model"] == "gpt2" else "max_position_embeddings": length}
    torch.manual_seed(case["seed"])
    model = build_model(
        SHAPES[case["model"]] | positions | {"initializer_range": WIDTH**-0.5},
        vocabulary=VOCABULARY,
        dropout=0.0,
        activation_checkpointing=False,
        chunk_tokens=4096,
    )
    wanted = (WANTED_OF_GPT2 if case["model"].startswith("gpt") else WANTED)[task]
    adam = torch.optim.AdamW(model.parameters(), lr=case["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    draw = torch.Generator().manual_seed(case["seed"] + 1)
    judged = sequences(task, JUDGED_ROWS, length, torch.Generator().manual_seed(1_000))
    began, step, right = time.process_time(), 0, 0.0
    while step < steps and right < wanted:
        for group in adam.param_groups:
            group["lr"] = case["lr"] * min((step + 1) / WARMUP_STEPS, 1 - 0.9 * step / steps)
        loss = model(*sequences(task, ROWS, length, draw))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        step += 1
        if step % REPORT_STEPS == 0:
            right = accuracy(model, *judged)
            seconds = time.process_time() - began
            name = f"{case['model']} {task} {length} seed {case['seed']}"
            say(
                f"{name}: {step}/{steps} loss {loss.item():.3f} right {right:.3f}, {seconds:,.0f} s"
            )
    return {
        "parameters": counted_parameters(model),
        "steps": step,
        "accuracy": right,
        "reached": right >= wanted,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def sequences(task: str, rows: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences and their labels `[rows, T]`, -100 where nothing is asked."""
    inputs = KEYS + VALUES + torch.randint(NOISES, (rows, length), generator=draw)
    labels = torch.full_like(inputs, -100)
    if task == "copy":
        told = KEYS + torch.randint(VALUES, (rows, COPIED), generator=draw)
        inputs[:, :COPIED], inputs[:, -COPIED:], labels[:, -COPIED:] = told, PLACE, told
        return inputs, labels
    half, count = length // 2, 1 if task == "needle" else ASKED
    for row in range(rows):
        keys = torch.randperm(KEYS, generator=draw)[:count]
        values = KEYS + torch.randint(VALUES, (count,), generator=draw)
        keys = torch.full_like(keys, MARKER) if task == "needle" else keys
        told = 2 * torch.randperm(half // 2, generator=draw)[:count]
        inputs[row, told], inputs[row, told + 1] = keys, values
        asked = half + torch.randperm(half, generator=draw)[:ASKED]
        which = torch.randperm(ASKED, generator=draw) % count
        inputs[row, asked], labels[row, asked] = keys[which], values[which]
    return inputs, labels


@torch.no_grad()
def accuracy(model: CausalLM, inputs: Tensor, labels: Tensor) -> float:
    """Return the share of right answers."""
    model.eval()
    found = torch.cat([model.logits(part).argmax(-1) for part in torch.split(inputs, ROWS)])
    model.train()
    return float((found == labels)[labels != -100].double().mean())


if __name__ == "__main__":
    main()
