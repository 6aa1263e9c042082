"""How fast a model is scored: HellaSwag's items a second beside lm-evaluation-harness.

    .venv/bin/python benchmarks/scoring.py --items hellaswag_val.jsonl --bpe-folder bpe/ \
        [--preset gpt2_124m] [--limit 16] [--batch 16] [--repeats 3] [--json FILE]

One transformers folder with random weights, in float32 on the CPU, one thread a process, the same
questions at the same batch; the harness has an environment of its own. Times are processor seconds
from the loaded model to the scores: encoding, computing, judging.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from measuring import Case, Column, Record, environment, measure, medians, say, table, write_report

HARNESS = "lm-eval[hf]==0.4.13"
COLUMNS = (
    Column("items_per_second", "items/s", "{:.2f}"),
    Column("acc", "acc", "{:.4f}"),
    Column("acc_norm", "acc_norm", "{:.4f}"),
    Column("faster", "of the harness", "{:.2f}"),
)


def main() -> None:
    """Make the model, measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description="How fast a model is scored.")
    parser.add_argument("--items", type=Path, required=True, help="HellaSwag as JSON lines")
    parser.add_argument("--bpe-folder", type=Path, required=True, help="vocab.bpe, encoder.json")
    parser.add_argument("--preset", default="gpt2_124m")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--environment", type=Path, help="keeps the harness for the next time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        name, folder = arguments.case
        print(json.dumps(CASES[name](Path(folder), arguments)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model", preset=arguments.preset, bpe_folder=arguments.bpe_folder)
        python = environment(arguments.environment or folder / "harness", whole=[HARNESS])
        options = sys.argv[1:]
        cases = [
            Case(name, [__file__, *options, "--case", name, str(folder / "model")], python=own)
            for name in CASES
            if (own := python if name == "harness" else sys.executable) is not None
        ]
        found = measure(cases, repeats=arguments.repeats, timeout_s=1800)
    rows = {name: medians(records) for name, records in found.items()}
    for row in rows.values():
        row["faster"] = row["items_per_second"] / rows["harness"]["items_per_second"]
    title = (
        f"{arguments.limit} items, {arguments.preset}, batch {arguments.batch}, "
        f"median of {arguments.repeats}"
    )
    print(table(rows, COLUMNS, title=title))
    if arguments.json is not None:
        settings = {key: str(value) for key, value in vars(arguments).items() if key != "json"}
        write_report(arguments.json, settings=settings, results=rows)


def make_model(folder: Path, *, preset: str, bpe_folder: Path) -> None:
    """Write a model with random weights, and GPT-2's tokenizer, as a transformers folder."""
    import torch

    from refocused.config.load_run import find_config
    from refocused.config.model_shape import load_shape
    from refocused.evaluate.model_weights import network_class
    from refocused.models.families import transformers_config
    from refocused.tokenizers.encoders import TokenizerChoice
    from refocused.tokenizers.tokenizer_json import as_transformers, tokenizer_file

    say(f"Writing a {preset} with random weights")
    shape = load_shape(find_config("models", preset))
    config = transformers_config(shape.settings, vocabulary=50_257, dropout=0.0)
    torch.manual_seed(0)
    network_class(config)(config).save_pretrained(folder)
    content = tokenizer_file(TokenizerChoice("gpt2", bpe_folder=bpe_folder), vocabulary=50_257)
    length = int(config.max_position_embeddings)
    as_transformers(content, end_of_text_id=50_256, max_length=length).save_pretrained(folder)


def ours(folder: Path, arguments: argparse.Namespace) -> Record:
    """Let `evaluate` score the items."""
    from refocused.evaluate.load_model import load_model
    from refocused.evaluate.score_model import Evaluation, Settings
    from refocused.evaluate.tasks import TaskFile
    from refocused.system.world import World

    model = load_model(folder, dtype="fp32")
    task = TaskFile("hellaswag", "hellaswag", arguments.items)
    began = time.process_time()
    settings = Settings(limit=arguments.limit, batch=arguments.batch)
    (timed,) = Evaluation(model, settings).run([task], world=World())
    seconds = time.process_time() - began
    measures = {name: measure.value for name, measure in timed.result.measures.items()}
    return {"items_per_second": arguments.limit / seconds, **measures}


def harness(folder: Path, arguments: argparse.Namespace) -> Record:
    """Let lm-evaluation-harness score the same questions."""
    import datasets
    import torch
    from lm_eval import evaluator
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    from refocused.evaluate.tasks import TaskFile, read_questions

    asked = read_questions(
        TaskFile("hellaswag", "hellaswag", arguments.items), limit=arguments.limit
    )
    rows = [{"query": q.context, "choices": list(q.endings), "label": q.answer} for q in asked]
    data = datasets.Dataset.from_list(rows)
    task = ConfigurableTask(
        config={
            "task": "own_hellaswag",
            "custom_dataset": lambda **_: {"test": data},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{query}}",
            "doc_to_target": "{{label}}",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            "metadata": {"version": 0},
        }
    )
    model = HFLM(
        pretrained=str(folder), batch_size=arguments.batch, dtype=torch.float32, device="cpu"
    )
    began = time.process_time()
    found = evaluator.evaluate(model, {"own_hellaswag": task}, bootstrap_iters=0)
    seconds = time.process_time() - began
    scores = found["results"]["own_hellaswag"]
    measures = {name: scores[f"{name},none"] for name in ("acc", "acc_norm")}
    return {"items_per_second": arguments.limit / seconds, **measures}


CASES = {"evaluate": ours, "harness": harness}


if __name__ == "__main__":
    main()
