"""What lm-evaluation-harness gives two small models: asked where it is installed, and on file.

    .venv/bin/python tests/evaluate/harness.py    # scores the items of harness_scores.json again

It needs the optional extra `parity`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from refocused.tokenizers.encoders import TokenizerChoice
from refocused.tokenizers.tokenizer_json import as_transformers, tokenizer_file

SCORES = Path(__file__).with_suffix("").with_name("harness_scores.json")
CONTEXT = 96
WORDS = [
    *("the", "a", "cat", "dog", "sat", "ran", "on", "to", "mat", "house", "and", "then"),
    *("it", "was", "red", "big", "fast", "home", "away", ",", "."),
]
# As its own task files have them (hellaswag.yaml, piqa.yaml, lambada_openai.yaml).
CHOICE = {
    "output_type": "multiple_choice",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    "doc_to_target": "label",
}
TASKS: dict[str, dict[str, Any]] = {
    "hellaswag": CHOICE
    | {"doc_to_text": "{{query}}", "doc_to_target": "{{label}}", "doc_to_choice": "choices"},
    "piqa": CHOICE
    | {"doc_to_text": "Question: {{goal}}\nAnswer:", "doc_to_choice": "{{[sol1, sol2]}}"},
    "multiple_choice": CHOICE | {"doc_to_text": "{{ctx}}", "doc_to_choice": "endings"},
    "lambada": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}, {"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


def bytes_model():
    """A GPT-2 of bytes."""
    ids = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256}
    config = transformers.GPT2Config(n_positions=CONTEXT, n_embd=24, n_layer=2, n_head=3, **ids)
    content = tokenizer_file(TokenizerChoice("bytes"), vocabulary=257)
    return _filled(transformers.GPT2LMHeadModel, config), _tokenizer(content, 256)


def words_model():
    """A GPT-NeoX of a few words, with some correct guesses."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    ids = {word: number for number, word in enumerate([*WORDS, "[UNK]"])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    config = transformers.GPTNeoXConfig(
        vocab_size=len(ids) + 1,
        max_position_embeddings=CONTEXT,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=48,
        bos_token_id=len(ids),
        eos_token_id=len(ids),
    )
    content = tokenizer.to_str().encode()
    return _filled(transformers.GPTNeoXForCausalLM, config), _tokenizer(content, len(ids))


MODELS = {"bytes": bytes_model, "words": words_model}


def _tokenizer(content, end_of_text_id):
    return as_transformers(content, end_of_text_id=end_of_text_id, max_length=CONTEXT)


def _filled(kind, config):
    """Set weights that do not depend on the versions of libraries."""
    network = kind(config)
    draw = np.random.RandomState(7)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            values = draw.standard_normal(weight.shape) * (0.3 if weight.dim() > 1 else 0.05)
            is_norm = weight.dim() == 1 and name.endswith("weight")
            weight.copy_(torch.tensor(values + is_norm, dtype=torch.float32))
    network.tie_weights()
    return network.eval()


def ask(model, items):
    """Evaluate a model with lm-evaluation-harness; return its measures by task."""
    import datasets
    from lm_eval import evaluator
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks.hellaswag.utils import process_docs

    network, tokenizer = MODELS[model]()
    tasks = []
    for name, rows in items.items():
        data = datasets.Dataset.from_list(rows)
        extra = {"process_docs": process_docs} if name == "hellaswag" else {}
        settings = {
            "task": f"own_{name}",
            "custom_dataset": lambda data=data, **_: {"test": data},
            "test_split": "test",
            "metadata": {"version": 0},
            **TASKS[name],
            **extra,
        }
        tasks.append(ConfigurableTask(config=settings))
    asked = evaluator.evaluate(
        HFLM(pretrained=network, tokenizer=tokenizer, batch_size=4, max_length=CONTEXT),
        {task.config.task: task for task in tasks},
        bootstrap_iters=2,  # of what has no formula, and is not kept
    )
    assert asked is not None
    return {name: _kept(asked, f"own_{name}") for name in items}


def _kept(asked, task):
    """Keep a task's measures, and the log-probability of every ending, item by item."""
    found = asked["results"][task]
    samples = sorted(asked["samples"][task], key=lambda sample: sample["doc_id"])
    answers = [answer for sample in samples for answer in sample["filtered_resps"]]
    sums = [float(one[0] if isinstance(one, (tuple, list)) else one) for one in answers]
    names = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "perplexity")
    names += ("byte_perplexity", "bits_per_byte")
    kept = {name: found[f"{name},none"] for name in names if f"{name},none" in found}
    return kept | {"log_probabilities": sums}


def main():
    import lm_eval

    items = json.loads(SCORES.read_text())["items"]
    content = {
        "version": lm_eval.__version__,
        "items": items,
        "scores": {model: ask(model, items) for model in MODELS},
    }
    SCORES.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
