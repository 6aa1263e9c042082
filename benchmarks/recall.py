"""Whether small models of each family learn: a copy over a long gap, and real text, byte by byte.

    .venv/bin/python benchmarks/recall.py copy [--families resonance] [--steps 200]
    .venv/bin/python benchmarks/recall.py text FILE ... [--families resonance gpt2] [--lr 2e-3]

* copy: 16 symbols, then nothing, then the question for them, 2,032 tokens after they were seen; the
  accuracy is that of new sequences, and 1/16 is chance;
* text: models of equal parameters train on the same bytes in the same order; the loss is that of
  bytes that none has seen, in nats a byte.

One table and JSON. All runs are seeded; training is a plain loop with torch's AdamW.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Column, Record, say, table, write_report
from torch import Tensor

from refocused.models.build import build_model
from refocused.models.causal_lm import CausalLM, counted_parameters

SYMBOLS, COPIED, COPY_LENGTH = 16, 16, 2048
NOTHING, QUESTION = SYMBOLS, SYMBOLS + 1
TEXT_LENGTH, TEXT_ROWS, BYTES = 512, 8, 256
HELD_OUT = 20  # one byte in so many, from the end
COPYING: dict[str, dict[str, Any]] = {
    "resonance": {
        "model_type": "resonance",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_resonators": 128,
        "max_position_embeddings": COPY_LENGTH,
        "initializer_range": 0.125,  # 1 / sqrt(D), as 0.02 nearly is at D 2,048
    },
    "ten": {
        "model_type": "ten",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_eigenstates": 64,
        "max_position_embeddings": COPY_LENGTH,
        "chunk_size": 32,
        "initializer_range": 0.125,
    },
}
READING: dict[str, dict[str, Any]] = {
    "resonance": {
        "model_type": "resonance",
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "num_resonators": 64,
        "max_position_embeddings": TEXT_LENGTH,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 192,
        "n_layer": 4,
        "n_head": 6,
        "n_inner": 650,  # as many parameters as the resonance model has, within 0.1 %
        "n_positions": TEXT_LENGTH,
    },
}
Batch = tuple[Tensor, Tensor]


def main() -> None:
    """Train, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Whether small models of each family learn.")
    parser.add_argument("task", choices=("copy", "text"))
    parser.add_argument("files", nargs="*", type=Path, help="text: .npy of tokens, or any bytes")
    parser.add_argument("--families", nargs="+")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=TEXT_ROWS, help="sequences of a step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shapes = COPYING if arguments.task == "copy" else READING
    if arguments.task == "text" and not arguments.files:
        parser.error("text needs files")
    text = np.concatenate([read_bytes(path) for path in arguments.files] or [np.zeros(0)])
    rows = {}
    for family in arguments.families or shapes:
        train, judge = (
            (copying(arguments.rows), copied)
            if arguments.task == "copy"
            else (reading(text, arguments.rows), lambda model: read(model, text))
        )
        rows[family] = learn(shapes[family], train, judge, steps=arguments.steps, rate=arguments.lr)
    columns = (
        Column("parameters", "parameters", "{:,.0f}"),
        Column("tokens", "tokens", "{:,.0f}"),
        Column("loss", "loss", "{:.4f}"),
        Column("accuracy", "accuracy", "{:.2%}"),
        Column("cpu_seconds", "CPU s", "{:,.0f}"),
    )
    print(table(rows, columns, title=f"After {arguments.steps} steps: {arguments.task}"))
    if arguments.json is not None:
        settings = {"task": arguments.task, "steps": arguments.steps, "rows": arguments.rows}
        write_report(arguments.json, settings=settings | {"lr": arguments.lr}, results=rows)


def learn(
    shape: dict[str, Any],
    batches: Iterator[Batch],
    judge: Callable[[CausalLM], Record],
    *,
    steps: int,
    rate: float,
) -> Record:
    """Train a fresh model with a short warm-up and a cosine; return what it has become."""
    torch.manual_seed(0)
    model = build_model(
        shape,
        vocabulary=BYTES,
        dropout=0.0,
        activation_checkpointing=False,
        chunk_tokens=2048,
    )
    adam = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    began, tokens = time.process_time(), 0
    for step in range(steps):
        share = step / steps
        for group in adam.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * share))
        inputs, labels = next(batches)
        loss = model(inputs, labels)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        tokens += inputs.numel()
        if (step + 1) % 50 == 0:
            say(f"{shape['model_type']} step {step + 1}/{steps} loss {loss.item():.4f}")
    record = {"parameters": counted_parameters(model), "tokens": tokens}
    seconds = time.process_time() - began
    with torch.no_grad():
        return record | {"cpu_seconds": seconds} | judge(model.eval())


def copying(rows: int, *, seed: int = 1) -> Iterator[Batch]:
    """Yield sequences to copy: symbols, nothing, and at the end one question for each symbol."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        symbols = torch.randint(SYMBOLS, (rows, COPIED), generator=generator)
        inputs = torch.full((rows, COPY_LENGTH), NOTHING)
        inputs[:, :COPIED] = symbols
        inputs[:, -COPIED:] = QUESTION
        labels = torch.full_like(inputs, -100)
        labels[:, -COPIED:] = symbols
        yield inputs, labels


def copied(model: CausalLM) -> Record:
    """Measure loss and accuracy on sequences that were not trained on."""
    inputs, labels = next(copying(64, seed=2))
    answers = torch.cat([model.logits(part)[:, -COPIED:].argmax(-1) for part in inputs.split(8)])
    accuracy = (answers == labels[:, -COPIED:]).double().mean()
    return {"loss": float(model(inputs[:8], labels[:8])), "accuracy": float(accuracy)}


def read_bytes(path: Path) -> np.ndarray[Any, Any]:
    """Read a file as byte tokens: an `.npy` of ids below 256, or what is in it."""
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False).astype(np.uint8)
    return np.frombuffer(path.read_bytes(), dtype=np.uint8)


def reading(text: np.ndarray[Any, Any], rows: int) -> Iterator[Batch]:
    """Yield windows of the text, at the same random places for every model."""
    generator = torch.Generator().manual_seed(1)
    last = len(text) - len(text) // HELD_OUT - TEXT_LENGTH - 1
    while True:
        starts = torch.randint(last, (rows,), generator=generator).tolist()
        yield windows(text, starts)


def read(model: CausalLM, text: np.ndarray[Any, Any]) -> Record:
    """Measure the loss over held-out windows, evenly placed."""
    first = len(text) - len(text) // HELD_OUT
    starts = np.linspace(first, len(text) - TEXT_LENGTH - 1, 64).astype(int).tolist()
    losses = [float(model(*windows(text, starts[at : at + 8]))) for at in range(0, 64, 8)]
    return {"loss": sum(losses) / len(losses)}


def windows(text: np.ndarray[Any, Any], starts: list[int]) -> Batch:
    """Return inputs and labels `[rows, T]` that begin at some places."""
    cut = [text[start : start + TEXT_LENGTH + 1].astype(np.int64) for start in starts]
    tokens = torch.from_numpy(np.stack(cut))
    return tokens[:, :-1], tokens[:, 1:]


if __name__ == "__main__":
    main()
