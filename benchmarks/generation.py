"""Tokens written a second, beside transformers' own pipeline on the same model and batch.

    .venv/bin/python benchmarks/generation.py [--models NAME,NAME] [--repeats 5] [--json FILE]

Untrained models read prompts of bytes of several lengths and write greedily; both must write the
same texts. They take turns in one process, so that a slow minute of the machine meets both; the
ratio is that of the medians of CPU time, which neighbours on the machine disturb least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, Column, Record, say, table, write_report

from refocused.config.model_shape import load_shape
from refocused.evaluate.generation import Sampling, generate
from refocused.evaluate.load_model import LoadedModel
from refocused.evaluate.model_weights import network_class
from refocused.models.families import transformers_config
from refocused.tokenizers.encoders import BYTES, BYTES_VOCABULARY, TokenizerChoice
from refocused.tokenizers.tokenizer_json import as_transformers, tokenizer_file

PROMPTS = ["def main(", "import os", "a", "for line in file:", "class Bucket:", "x = 1", "#", "if "]
COLUMNS = (
    Column("tokens_per_second", "tokens/s"),
    Column("cpu_ms", "CPU ms a token", "{:.3f}"),
    Column("ratio", "CPU, of the pipeline's", "{:.3f}"),
)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Tokens written a second.")
    parser.add_argument("--models", default="demo_gpt2,neox_tiny")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Record] = {}
    for name in arguments.models.split(","):
        model = untrained(name, device=arguments.device)
        for batch in map(int, arguments.batches.split(",")):
            say(f"{name}, batch {batch}")
            rows |= compared(name, model, batch=batch, arguments=arguments)
    print(table(rows, COLUMNS, title=f"{arguments.tokens} tokens after each of {len(PROMPTS)}"))
    if arguments.json is not None:
        settings = {key: str(value) for key, value in vars(arguments).items() if key != "json"}
        write_report(arguments.json, settings=settings, results=rows)


def untrained(name: str, *, device: str) -> LoadedModel:
    """Build a model of a shape in config/models, with as many ids as bytes have."""
    settings = dict(load_shape(ROOT / "config" / "models" / f"{name}.json").settings) | {
        "initializer_range": 0.1
    }
    config = transformers_config(settings, vocabulary=BYTES_VOCABULARY, dropout=0.0)
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    network = network_class(config)(config).eval().to(device)
    content = tokenizer_file(TokenizerChoice(BYTES), vocabulary=BYTES_VOCABULARY)
    tokenizer = as_transformers(content, end_of_text_id=None, max_length=512)
    return LoadedModel(network, tokenizer, Path(name), {})


def compared(
    name: str, model: LoadedModel, *, batch: int, arguments: argparse.Namespace
) -> dict[str, Record]:
    """Let both write in turns; return a row for each."""
    import transformers

    tokenizer = model.tokenizer
    tokenizer.padding_side = "left"
    pipeline = transformers.pipeline("text-generation", model=model.network, tokenizer=tokenizer)
    sampling = Sampling(tokens=arguments.tokens, temperature=0.0)

    def ours() -> list[str]:
        answers = generate(model, PROMPTS, sampling, batch=batch).answers
        return [answer.text for answer in answers]

    def theirs() -> list[str]:
        config = transformers.GenerationConfig(
            max_new_tokens=arguments.tokens,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
        found: Any = pipeline(
            PROMPTS, generation_config=config, batch_size=batch, return_full_text=False
        )
        return [one["generated_text"] for (one,) in found]

    if ours() != theirs():  # which also warms both up
        raise SystemExit(f"{name}: the two do not write the same texts.")
    tokens = generate(model, PROMPTS, sampling, batch=batch).tokens
    contenders = {"refocused": ours, "pipeline": theirs}
    turns: dict[str, list[tuple[float, float]]] = {who: [] for who in contenders}
    for _ in range(arguments.repeats):
        for who, call in contenders.items():
            turns[who].append(timed(call))
    rows = {}
    for who, times in turns.items():
        wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        rows[f"{name}, batch {batch}, {who}"] = {
            "tokens_per_second": tokens / wall,
            "cpu_ms": 1000 * cpu / tokens,
            "ratio": cpu,
        }
    base = rows[f"{name}, batch {batch}, pipeline"]["ratio"]
    return {row: {**record, "ratio": record["ratio"] / base} for row, record in rows.items()}


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes, and its CPU seconds."""
    began, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - cpu


if __name__ == "__main__":
    main()
