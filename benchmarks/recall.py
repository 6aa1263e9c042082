"""Measure recall of tokens seen 512 to 1,550 tokens before, amid noise, by small models at T 2,048.

    .venv/bin/python benchmarks/recall.py [--families ten resonance gpt2] [--steps 300]

Each of 4 kinds has a value of 8 in every sequence, and each pair of kind and value is a token id of
its own. A passage of 512 tokens, half of them such items and half noise, begins anywhere in the
first 512; then only noise comes. Among the last 512 tokens every other one is a question, the id of
a kind, and the answer is the item of that kind: chance is 1/8. Nothing but the answers is learned.
The table tells the accuracy on new sequences, by the distance to the last such item; and that of
the same model on the same sequences when everything but the last 512 tokens is other noise, which
has to be at chance.

What it shows: a state that holds for 512 tokens and more which of several things was seen, and a
read-out that asks for one of them. What it does not show: values bound to keys as a sequence goes,
which mixing that does not look at the content (both of our families) cannot do in general: with
the value as a token of its own behind a marker, at T 512, both stay at chance and GPT-2 solves it.

Shapes are those of the presets at width 64: horizons from 1 to T, weights drawn from N(0, 1/D) as
0.02 nearly does at D 2,048, inner widths set for equal parameters. Training is a plain loop with
torch's AdamW, seeded, in float32 on one thread.
"""

import math
import time
from typing import Any

import torch
from measuring import Column, Record, parser_of, say, table, write_report
from torch import Tensor

from refocused.models.causal_lm import CausalLM, counted_parameters
from refocused.models.families import build_model

LENGTH, PASSAGE, ASKING = 2048, 512, 512
KINDS, VALUES, NOISES = 4, 8, 64
VOCABULARY = 128  # noise, items, questions, and some that are never seen
ROWS, JUDGED_ROWS, REPORT_STEPS = 8, 128, 25
DISTANCES = range(512, 1536, 256)  # each begins a column of the table
WIDTH, LAYERS = 64, 2
COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": LENGTH,
    "initializer_range": WIDTH**-0.5,
}
SHAPES: dict[str, dict[str, Any]] = {
    "resonance": COMMON | {"model_type": "resonance", "num_resonators": 128},
    "ten": COMMON
    | {
        "model_type": "ten",
        "num_eigenstates": 64,
        "chunk_size": 32,
        "intermediate_size": 321,  # as many parameters as the resonance model has, within 0.1 %
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_inner": 448,
        "n_positions": LENGTH,
        "initializer_range": WIDTH**-0.5,
    },
}


def main() -> None:
    """Train, print the table, write the JSON."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--families", nargs="+", default=SHAPES, choices=SHAPES)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=4e-3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {
        family: learn(SHAPES[family], steps=arguments.steps, rate=arguments.lr)
        for family in arguments.families
    }
    columns = (
        Column("parameters", "parameters", "{:,.0f}"),
        Column("tokens", "tokens", "{:,.0f}"),
        Column("loss", "loss", "{:.4f}"),
        Column("accuracy", "accuracy", "{:.1%}"),
        *(Column(f"from_{at}", f"{at:,}-{at + 255:,}", "{:.1%}") for at in DISTANCES),
        Column("without_the_past", "past cut", "{:.1%}"),
        Column("cpu_seconds", "CPU s", "{:,.0f}"),
    )
    title = f"Recall at T {LENGTH:,}, after {arguments.steps} steps; chance is {1 / VALUES:.1%}"
    print(table(rows, columns, title=title))
    write_report(arguments, rows)


def learn(shape: dict[str, Any], *, steps: int, rate: float) -> Record:
    """Train a new model with a short warm-up and a cosine schedule; return its figures."""
    torch.manual_seed(0)
    model = build_model(
        shape, vocabulary=VOCABULARY, dropout=0.0, activation_checkpointing=False, chunk_tokens=2048
    )
    adam = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    draw = torch.Generator().manual_seed(1)
    began = time.process_time()
    recent: list[float] = []
    for step in range(steps):
        for group in adam.param_groups:
            cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)
            group["lr"] = rate * min(1, (step + 1) / 20) * cosine
        inputs, labels = sequences(ROWS, draw)
        loss = model(inputs, labels)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        recent.append(loss.item())
        if len(recent) == REPORT_STEPS:
            mean, recent = sum(recent) / len(recent), []
            seconds = time.process_time() - began
            say(f"{shape['model_type']} {step + 1}/{steps} loss {mean:.4f}, {seconds:,.0f} CPU s")
    return {
        "parameters": counted_parameters(model),
        "tokens": steps * ROWS * LENGTH,
        "cpu_seconds": time.process_time() - began,
        **judged(model.eval()),
    }


def sequences(rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences and their labels `[rows, T]`, -100 where there is no question."""
    inputs = torch.randint(NOISES, (rows, LENGTH), generator=draw)
    labels = torch.full_like(inputs, -100)
    for row in range(rows):
        values = torch.randint(VALUES, (KINDS,), generator=draw)
        items = NOISES + torch.arange(KINDS) * VALUES + values
        first = int(torch.randint(PASSAGE + 1, (), generator=draw))
        places = first + torch.randperm(PASSAGE, generator=draw)[: PASSAGE // 2]
        inputs[row, places] = items.repeat(PASSAGE // 2 // KINDS)
        asked = LENGTH - ASKING + torch.randperm(ASKING, generator=draw)[: ASKING // 2]
        kinds = torch.randint(KINDS, asked.shape, generator=draw)
        inputs[row, asked] = NOISES + KINDS * VALUES + kinds
        labels[row, asked] = items[kinds]
    return inputs, labels


@torch.no_grad()
def judged(model: CausalLM) -> Record:
    """Measure loss and accuracies on sequences that were not trained on."""
    draw = torch.Generator().manual_seed(2)
    inputs, labels = sequences(JUDGED_ROWS, draw)
    asked = labels != -100
    right = (answers(model, inputs) == labels)[asked]
    distance = distances(inputs, labels)[asked]
    cut = inputs.clone()
    cut[:, :-ASKING] = torch.randint(NOISES, cut[:, :-ASKING].shape, generator=draw)
    record: Record = {
        "loss": float(model(inputs[:ROWS], labels[:ROWS])),
        "accuracy": share(right),
        "without_the_past": share((answers(model, cut) == labels)[asked]),
    }
    for at in DISTANCES:
        record[f"from_{at}"] = share(right[(distance >= at) & (distance < at + DISTANCES.step)])
    return record


def answers(model: CausalLM, inputs: Tensor) -> Tensor:
    """Return the likeliest next tokens `[rows, T]`."""
    return torch.cat([model.logits(part).argmax(-1) for part in torch.split(inputs, ROWS)])


def distances(inputs: Tensor, labels: Tensor) -> Tensor:
    """Return how many tokens before each question its answer was last seen, `[rows, T]`."""
    places = torch.arange(LENGTH)
    found = torch.zeros_like(labels)
    for item in range(NOISES, NOISES + KINDS * VALUES):
        last = torch.where(inputs == item, places, -1).amax(dim=1, keepdim=True)
        found = torch.where(labels == item, places - last, found)
    return found


def share(right: Tensor) -> float | None:
    """Return the share of right answers; None without any questions."""
    return float(right.double().mean()) if len(right) else None


if __name__ == "__main__":
    main()
