"""The loss of each family on real text, at equal parameters: after equal tokens and equal time.

    .venv/bin/python benchmarks/families.py FILE.txt ... [--lengths 512 2048 8192] [--seeds 1 2 3]

The files become byte shards by `prepare_data tokenize`; then every model trains on one CPU rank by
the product's own train command: the same engine, optimizer, schedule, order of sequences and seed,
8,192 tokens a step at every length. GPT-2 trains for `--steps`, the others once for as many and
once for as many as fit into GPT-2's CPU time with the same seed. What a command of one step takes
does not count. Each schedule ends at its own last step. The inner width is chosen so that all have
as many parameters as plain resonance. The loss is that of sequences that none has trained on, in
nats a byte: median, minimum and maximum over the seeds.

Each training is a line of `--results`, written when it ends. The next call goes on with those that
are missing, and prints all; two calls with different seeds may run side by side.
"""

import argparse
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

from measuring import (
    ROOT,
    WORK,
    Record,
    finished,
    launched,
    lines_of,
    parser_of,
    say,
    spread,
    spread_table,
)

from refocused.config.model_shape import shape_from
from refocused.estimate.flops import count_parameters

STEP_TOKENS = 8192
VOCABULARY = 257  # bytes, and the end of a document
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_head": 2},
    "ten": {"convolution_width": 4},
    "resonance": {"convolution_width": 4},
}
RATES = {"gpt2": 4e-3, "ten": 4e-3, "resonance": 8e-3}  # the best of 2e-3, 4e-3 and 8e-3
RUN = """
run: {{name: run, steps: {steps}, directory: runs, seed: {seed}}}
model: {{preset: shape.json, sequence_length: {length}, vocabulary_multiple: 64}}
batch: {{micro_batch_size: {sequences}, gradient_accumulation_steps: 1}}
data: {{source: ../text, cache: cache, tokenizer: bytes, validation_fraction: 0.05}}
optimizer: {{lr: {rate}}}
schedule: {{warmup_steps: {warmup}}}
precision: {{dtype: fp32}}
zero: {{stage: 1}}
checkpoint: {{interval: 0, export_final: false}}
evaluation: {{interval: 0, sequences: {validated}}}
log: {{interval: 10}}
"""


def main() -> None:
    """Train what is missing, and print the table of all results."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("files", nargs="+", type=Path, help="text")
    parser.add_argument("--models", nargs="+", default=["ten", "resonance"], choices=MODELS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--steps", nargs="+", type=int, default=[200, 150, 80], help="of GPT-2")
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--lr", type=float, help="of all, instead of each one's best")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--results", type=Path, default=WORK / "families.jsonl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = [str(file.absolute()) for file in arguments.files]
        tokenize = ["tokenize", *texts, "--out=text", "--tokenizer=bytes"]
        command("prepare_data", *tokenize, work=Path(folder))
        for seed in arguments.seeds:
            for length, steps in zip(arguments.lengths, arguments.steps, strict=True):
                case = {"length": length, "steps": steps, "seed": seed, "given": "tokens"}
                compare(case, arguments, Path(folder))
    rows: dict[str, list[Record]] = {}
    for one in lines_of(arguments.results):
        if one["given"] != "start":
            name = f"T {one['length']:5,}, {one['model']}, equal {one['given']}"
            rows.setdefault(name, []).append(one)
    found = {name: spread(rows[name]) for name in sorted(rows)}
    print(spread_table(found, title="Nats a byte, over the seeds"))


def compare(case: Record, chosen: argparse.Namespace, work: Path) -> None:
    """Train GPT-2, and the others for as many tokens and for as long."""
    theirs = trained(case | {"model": "gpt2"}, chosen, work)
    for model in chosen.models:
        ours = trained(case | {"model": model}, chosen, work)
        steps = 1 + round((case["steps"] - 1) * theirs["seconds"] / ours["seconds"])
        trained(case | {"model": model, "given": "time", "steps": steps}, chosen, work)


def trained(case: Record, chosen: argparse.Namespace, work: Path) -> Record:
    """Return the figures of a training, which takes place if it is not among the results."""
    model, form = case["model"], {"layers": 4, "width": chosen.width, **MODELS[case["model"]]}
    case |= {"form": form, "rate": chosen.lr or RATES[model]}

    def measure() -> Record:
        start = case | {"given": "start", "steps": 1, "seed": 1}
        seconds = 0.0 if case == start else trained(start, chosen, work)["seconds"]
        shape = shape_of(model, case["length"], **form)
        with tempfile.TemporaryDirectory(dir=work) as folder:
            loss, took = loss_of(shape, case, work=Path(folder))
        say(" ".join(str(case[key]) for key in ("length", "model", "given", "seed")) + f" {loss}")
        return {"parameters": parameters(shape), "loss": loss, "seconds": took - seconds}

    return finished(chosen.results, case, measure)


def loss_of(shape: dict[str, Any], case: Record, *, work: Path) -> tuple[float, float]:
    """Train a model with the train command; return its validation loss and the CPU time."""
    sequences = STEP_TOKENS // case["length"]
    run = RUN.format(
        **case, sequences=sequences, validated=8 * sequences, warmup=case["steps"] // 10
    )
    (work / "run.yaml").write_text(run)
    (work / "shape.json").write_text(json.dumps(shape))
    seconds = command("train", "--config", "run.yaml", work=work)
    log = work / "runs" / "run" / "logs" / "training_metrics.jsonl"
    losses = [json.loads(line).get("validation_loss") for line in log.read_text().splitlines()]
    return [loss for loss in losses if loss is not None][-1], seconds


def shape_of(family: str, length: int, *, layers: int, width: int, **form: Any) -> dict[str, Any]:
    """Return a family's shape, with as many parameters as the plain resonance model has."""

    def widened(kind: str, inner: int, form: dict[str, Any]) -> dict[str, Any]:
        return shape_with(kind, length, layers=layers, width=width, inner=inner) | form

    wanted = parameters(widened("resonance", 4 * width, {}))
    one, two = (parameters(widened(family, inner, form)) for inner in (1, 2))
    return widened(family, round(1 + (wanted - one) / (two - one)), form)


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


def command(name: str, *arguments: str, work: Path) -> float:
    """Run one of the product's commands; return its CPU time in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    launched([str(ROOT / "launch" / f"{name}.py"), *arguments], folder=work, timed=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
