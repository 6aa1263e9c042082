"""The loss of each family after the same tokens of real text, at equal parameters.

    .venv/bin/python benchmarks/families.py FILE.txt ... [--steps 150] [--lengths 512 2048]
        [--layers 4] [--width 96]

The files become byte shards by `prepare_data tokenize`; then every family trains on one CPU rank by
the product's own train command: the same engine, optimizer, schedule, order of windows and seed,
4,096 tokens a step at every length. Shapes have the presets' proportions; the inner
width of ten and GPT-2 is chosen so that all have as many parameters as resonance has. The loss is
that of windows that none has trained on, in nats a byte. One table and JSON.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import ROOT, Column, Record, parser_of, say, table, write_report

from refocused.config.model_shape import shape_from
from refocused.estimate.flops import count_parameters

STEP_TOKENS = 4096
VOCABULARY = 257  # bytes, and the end of a document
RUN = """
run: {{name: {family}-{length}, steps: {steps}, directory: runs, seed: 1}}
model: {{preset: {family}-{length}.json, sequence_length: {length}, vocabulary_multiple: 64}}
batch: {{micro: {windows}, accumulation: 1}}
data: {{source: text, cache: cache, tokenizer: bytes, validation_fraction: 0.05}}
optimizer: {{lr: {lr}}}
schedule: {{warmup_steps: 20}}
precision: {{dtype: fp32}}
zero: {{stage: 1}}
checkpoint: {{interval: 0}}
evaluation: {{interval: 0, windows: {validated}}}
log: {{interval: 10}}
"""


def main() -> None:
    """Prepare the text, train every family at every length, print the table, write the JSON."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("files", nargs="+", type=Path, help="text")
    parser.add_argument("--families", nargs="+", default=("gpt2", "resonance", "ten"))
    parser.add_argument("--lengths", nargs="+", type=int, default=(512, 2048))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        texts = [str(file.resolve()) for file in arguments.files]
        command("prepare_data", "tokenize", *texts, "--out=text", "--tokenizer=bytes", work=work)
        rows = {
            f"{family}, T {length:,}": trained(
                family,
                length,
                shape_of(family, length, layers=arguments.layers, width=arguments.width),
                steps=arguments.steps,
                lr=arguments.lr,
                work=work,
            )
            for length in arguments.lengths
            for family in arguments.families
        }
    columns = (
        Column("parameters", "parameters", "{:,.0f}"),
        Column("tokens", "tokens", "{:,.0f}"),
        Column("loss", "validation loss", "{:.4f}"),
        Column("training_loss", "training loss", "{:.4f}"),
        Column("cpu_seconds", "CPU s", "{:,.0f}"),
    )
    print(table(rows, columns, title="Equal tokens of the same bytes, nats a byte"))
    write_report(arguments, rows)


def trained(
    family: str, length: int, shape: dict[str, Any], *, steps: int, lr: float, work: Path
) -> Record:
    """Train one model with the train command; return its final figures."""
    (work / f"{family}-{length}.json").write_text(json.dumps(shape))
    run = RUN.format(
        family=family,
        length=length,
        steps=steps,
        lr=lr,
        windows=STEP_TOKENS // length,
        validated=16 * STEP_TOKENS // length,
    )
    (work / "run.yaml").write_text(run)
    say(f"{family} at T {length:,}")
    cpu_seconds = command("train", "--config", "run.yaml", work=work)
    log = work / "runs" / f"{family}-{length}" / "logs" / "training_metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    record = {
        "parameters": parameters(shape),
        "tokens": steps * STEP_TOKENS,
        "loss": last(lines, "validation_loss"),
        "training_loss": last(lines, "loss"),
        "cpu_seconds": cpu_seconds,
    }
    say(f"  validation loss {record['loss']}, {cpu_seconds:,.0f} CPU s")
    return record


def shape_of(family: str, length: int, *, layers: int, width: int) -> dict[str, Any]:
    """Return a family's shape, with as many parameters as the resonance model has."""

    def widened(kind: str, inner: int) -> dict[str, Any]:
        return shape_with(kind, length, layers=layers, width=width, inner=inner)

    wanted = parameters(widened("resonance", 4 * width))
    one, two = (parameters(widened(family, inner)) for inner in (1, 2))
    return widened(family, round(1 + (wanted - one) / (two - one)))


def shape_with(family: str, length: int, *, layers: int, width: int, inner: int) -> dict[str, Any]:
    """Return a family's shape with a given inner width of the feed-forward part."""
    if family == "gpt2":
        sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_inner": inner}
        return {"model_type": family, "vocab_size": VOCABULARY, "n_positions": length, **sizes}
    heads = {"num_attention_heads": 4}
    mixing = {"resonance": {"num_resonators": 16}, "ten": {"num_eigenstates": 12}}.get(
        family, heads
    )
    if family in ("llama", "qwen3", "nanochat"):
        mixing = {**heads, "num_key_value_heads": 4, "head_dim": width // 4}
        mixing["tie_word_embeddings"] = True
    return {
        "model_type": family,
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "max_position_embeddings": length,
        **mixing,
    }


def parameters(shape: dict[str, Any]) -> int:
    """Count a shape's parameters."""
    return count_parameters(shape_from(shape, where="benchmark")).total


def last(lines: list[Record], key: str) -> float | None:
    """Return the last value of a metric; None where it was never recorded."""
    return next((line[key] for line in reversed(lines) if line.get(key) is not None), None)


def command(name: str, *arguments: str, work: Path) -> float:
    """Run one of the product's commands; return its CPU time in seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    script = ROOT / "launch" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=work,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    say(f"  {name}: {time.monotonic() - began:,.0f} s")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
