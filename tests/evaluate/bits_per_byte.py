"""Bits per byte of a small model: what nanochat and lm-evaluation-harness give, on file or asked.

    .venv/bin/python tests/evaluate/bits_per_byte.py NANOCHAT

NANOCHAT is a checkout of it. This records anew what both answer; lm-evaluation-harness is in the
optional extra `parity`.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from refocused.evaluate.continuations import LossSums, ValidationLoss, tensors_of
from refocused.evaluate.score_model import rolling_sequences
from refocused.models.causal_lm import CausalLM
from refocused.models.head_loss import IGNORED_LABEL
from refocused.prepare.texts.text_documents import train_byte_pairs
from refocused.system.world import World
from refocused.tokenizers.encoders import bytes_by_character
from refocused.tokenizers.tokenizer_json import byte_lengths

ANSWERS = Path(__file__).with_suffix(".json")
# Byte pairs of it end inside characters of three and four bytes.
TEXT = " ".join(
    f"the cat sat {number} caf\u00e9 {chr(0x4E00 + 97 * number)}{chr(0x1F300 + 7 * number)}"
    for number in range(80)
)
VOCABULARY = 330
Batches = Sequence[tuple[Tensor, Tensor]]


def pairs_model() -> tuple[Any, Any]:
    """A GPT-2 of byte pairs, some of which are no UTF-8 by themselves."""
    content = train_byte_pairs([TEXT], vocabulary=VOCABULARY)
    end = json.loads(content)["added_tokens"][0]["id"]
    ids = {"vocab_size": VOCABULARY, "bos_token_id": end, "eos_token_id": end}
    shape = {"n_positions": harness.CONTEXT, "n_embd": 24, "n_layer": 2, "n_head": 3}
    network = harness._filled(transformers.GPT2LMHeadModel, transformers.GPT2Config(**shape, **ids))
    return network, harness._tokenizer(content, end)


def batches_of(tokenizer: Any, *, rows: int = 2) -> Batches:
    """Return packed documents, which special tokens separate, with some labels left out."""
    documents = [TEXT[first : first + 90] for first in range(0, 1800, 90)]
    encoded = (tokenizer(text)["input_ids"] for text in documents)
    ids = [number for document in encoded for number in (tokenizer.eos_token_id, *document)]
    length = harness.CONTEXT
    whole = torch.tensor(ids[: len(ids) // (length * 4) * length * 4 + 1])
    labels = whole[1:].clone()
    labels[::7] = IGNORED_LABEL
    both = (tensor.view(-1, length).split(rows) for tensor in (whole[:-1], labels))
    return list(zip(*both, strict=True))


def ours(model: CausalLM, lengths: Tensor | None, batches: Batches) -> ValidationLoss:
    """Return the losses that a validation of these batches has."""
    sums = LossSums(lengths)
    for inputs, labels in batches:
        with torch.no_grad():
            sums.add(None, model(inputs, labels, of_each=True), labels)
    loss = sums.mean(World())
    assert loss is not None
    return loss


def lengths_of(tokenizer: Any) -> Tensor:
    """Return the lengths of the ids in bytes, as a validation takes them."""
    lengths = byte_lengths(tokenizer, vocabulary=VOCABULARY)
    assert lengths is not None
    return torch.from_numpy(lengths)


def rolled(tokenizer: Any) -> Batches:
    """Return the sequences in which lm-evaluation-harness scores a text, a row each."""
    sequences = rolling_sequences(
        tokenizer(TEXT)["input_ids"],
        first=tokenizer.eos_token_id,
        context=harness.CONTEXT,
        stride=harness.CONTEXT,
    )
    return [tensors_of([sequence]) for sequence in sequences]


def nanochats(network: Any, tokenizer: Any, batches: Batches) -> float:
    """Return nanochat's answer; its folder is importable. Token lengths as in its tok_train.py."""
    loss_eval = importlib.import_module("nanochat.loss_eval")
    byte_of = bytes_by_character()
    sizes = [
        0 if number in tokenizer.all_special_ids else len(bytes(byte_of[c] for c in token))
        for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    ]

    class Model:
        def get_device(self) -> torch.device:
            return torch.device("cpu")

        def __call__(self, ids: Tensor, labels: Tensor, loss_reduction: str) -> Tensor:
            logits = network(ids).logits.flatten(0, 1)
            return F.cross_entropy(
                logits, labels.flatten(), ignore_index=-1, reduction=loss_reduction
            )

    marked = [(ids, labels.where(labels != IGNORED_LABEL, -1)) for ids, labels in batches]
    sizes = torch.tensor(sizes, dtype=torch.int32)
    answer: float = loss_eval.evaluate_bpb(Model(), marked, len(marked), sizes)
    return answer


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    harness.MODELS["pairs"] = pairs_model
    (scores,) = harness.ask("pairs", {"perplexity": [{"text": TEXT}]}).values()
    network, tokenizer = pairs_model()
    answers = {
        "nanochat": nanochats(network, tokenizer, batches_of(tokenizer)),
        "lm_eval": scores["bits_per_byte"],
    }
    model, lengths = CausalLM(network, chunk_tokens=50), lengths_of(tokenizer)
    for name, batches in (("nanochat", batches_of(tokenizer)), ("lm_eval", rolled(tokenizer))):
        here = ours(model, lengths, batches).bits_per_byte
        print(f"{name:<8} {answers[name]:.9f}, here {here:.9f}")
    ANSWERS.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    main()
