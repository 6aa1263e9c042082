"""A CORE bundle of our own making, and what nanochat's code answers: on file, or asked.

    .venv/bin/python tests/evaluate/core_bundle.py NANOCHAT [BUNDLE MODEL [LIMIT]]

NANOCHAT is a checkout of it. Alone, this records anew what it answers on the bundle of the tests;
with an unpacked bundle and a model folder, it prints how many answers differ from ours, by task.
"""

import csv
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from evaluate.harness import MODELS, WORDS

from refocused.evaluate.continuations import Encoder, score_all
from refocused.evaluate.core import CoreTask, encode_items, outcomes, read_bundle
from refocused.evaluate.load_model import load_model
from refocused.evaluate.score_model import NetworkScorer
from refocused.evaluate.tasks import CORE_FILE
from refocused.system.world import World

ANSWERS = Path(__file__).with_name("core_answers.json")
CONTEXT = 96
# Label, type, examples shown, delimiter, random baseline in percent.
TASKS = [
    ("choices", "multiple_choice", 2, "\nAnswer: ", 25.0),
    ("choices_zeroshot", "multiple_choice", 0, " ", 50.0),
    ("schema", "schema", 1, " ", 50.0),
    ("words", "language_modeling", 3, " ", 0.0),
    ("trailing_space", "language_modeling", 0, "", 0.0),
]


def write_bundle(folder: Path) -> Path:
    """Write a bundle in the published format, from words that the models of the tests know.

    Returns its `core.yaml`.
    """
    draw = random.Random(11)

    def words(most: int, least: int = 1) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    (folder / "eval_data").mkdir(parents=True)
    for label, kind, *_ in TASKS:
        rows: list[dict[str, Any]] = []
        for _ in range(24):
            if kind == "multiple_choice":
                choices = [words(3) for _ in range(4)]
                rows.append({"query": words(6), "choices": choices, "gold": draw.randrange(4)})
            elif kind == "schema":
                options = [words(4), words(4)]
                gold = draw.randrange(2)
                row = {"context_options": options, "continuation": words(3), "gold": gold}
                rows.append(row)
            else:
                context = words(5, 3) + (" " if label == "trailing_space" else "")
                answer = words(1)
                answer = f" {answer}" if label == "trailing_space" else answer
                rows.append({"context": context, "continuation": answer})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "eval_data" / f"{label}.jsonl").write_text(lines)
    tasks = [
        {
            "label": label,
            "dataset_uri": f"{label}.jsonl",
            "num_fewshot": [shown],
            "icl_task_type": kind,
            **({} if delimiter == " " else {"continuation_delimiter": delimiter}),
        }
        for label, kind, shown, delimiter, _ in TASKS
    ]
    (folder / CORE_FILE).write_text(json.dumps({"icl_tasks": tasks}))
    with (folder / "eval_meta_data.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Eval Task", "Task Category", "Random baseline"])
        writer.writerows([label, "made up", baseline] for label, *_, baseline in TASKS)
    return folder / CORE_FILE


def ours(network: Any, tokenizer: Any, tasks: list[CoreTask], context: int) -> dict[str, str]:
    """Return our answers by task, one character an item: 1 is right."""
    encoder = Encoder(tokenizer, context_tokens=context, vocabulary=network.config.vocab_size)
    answers = {}
    for task in tasks:
        items = encode_items(task, encoder)
        assert len(items) == len(task.items), f"{task.label}: an item cannot be scored"
        continuations = [choice for _, choices in items for choice in choices]
        scored = score_all(continuations, NetworkScorer(network), rows=16, world=World())
        assert scored is not None
        right = outcomes(items, iter(scored))
        answers[task.label] = "".join(str(int(item)) for item in right)
    return answers


def nanochats(network: Any, tokenizer: Any, tasks: list[CoreTask], context: int) -> dict[str, str]:
    """Return nanochat's answers; its folder is importable."""
    core = importlib.import_module("nanochat.core_eval")

    class Model:
        max_seq_len = context

        def __call__(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = network(ids).logits
            return logits

    class Tokenizer:
        def get_bos_token_id(self) -> int:
            first = tokenizer.bos_token_id
            return int(tokenizer.eos_token_id if first is None else first)

        def __call__(self, texts: list[str], prepend: int) -> list[list[int]]:
            return [[prepend, *ids] for ids in tokenizer(texts)["input_ids"]]

    answers = {}
    for task in tasks:
        meta = {
            "task_type": task.kind,
            "num_fewshot": task.examples,
            "continuation_delimiter": task.delimiter,
        }
        answers[task.label] = "".join(
            str(int(core.evaluate_example(n, Model(), Tokenizer(), task.items, "cpu", meta)))
            for n in range(len(task.items))
        )
    return answers


def main() -> None:
    nanochat, *rest = sys.argv[1:]
    sys.path.insert(0, nanochat)
    if not rest:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            tasks = read_bundle(write_bundle(Path(folder)))
        answers = {name: nanochats(*make(), tasks, CONTEXT) for name, make in MODELS.items()}
        ANSWERS.write_text(json.dumps(answers, indent=1) + "\n")
        return
    bundle, model, *limit = rest
    loaded = load_model(Path(model), dtype="fp32")
    tasks = read_bundle(Path(bundle) / CORE_FILE, limit=int(limit[0]) if limit else None)
    context = loaded.trained_length or loaded.network.config.max_position_embeddings
    both = [
        answer(loaded.network, loaded.tokenizer, tasks, context) for answer in (ours, nanochats)
    ]
    for label, mine in both[0].items():
        differ = sum(a != b for a, b in zip(mine, both[1][label], strict=True))
        print(f"{label:<40} {len(mine):>6} items, {differ} differ")


if __name__ == "__main__":
    main()
