"""A sample of what the model writes, straight from the partitioned engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from refocused.engine.engine import Engine

TEMPERATURE = 0.8
TOP_K = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Sampler:
    """Continues a prompt, always by the same draws.

    Attributes:
        tokenizer: transformers' own class.
        prompt: Text to continue; not empty.
        tokens: Tokens to write at most.
        context_tokens: Longest context that the model is trained on.
        seed: Of the draws.
    """

    tokenizer: Any
    prompt: str
    tokens: int
    context_tokens: int
    seed: int

    def write(
        self, engine: Engine, *, stopping: Callable[[], object] = lambda: False
    ) -> str | None:
        """Return the prompt and its continuation, up to the end of a text; every rank must call.

        Ids without a meaning, such as the vocabulary's padding, are never drawn.

        Args:
            engine: Of the model.
            stopping: Asked before each token, alike on all ranks; a true answer ends it.

        Returns:
            None when stopped.
        """
        generator = torch.Generator().manual_seed(self.seed)
        known = torch.tensor(sorted(self.tokenizer.get_vocab().values()))
        ids = list(self.tokenizer(self.prompt)["input_ids"])
        begins = len(ids)
        with engine.weights_held():
            for _ in range(self.tokens):
                if stopping():
                    return None
                context = torch.tensor([ids[-self.context_tokens :]])
                logits = engine.next_token_logits(context)[0].cpu()
                ids.append(_drawn(logits, known, generator))
        # Drawn to the end by all ranks, whose numbers may differ in their last digits.
        written = _until(ids[begins:], self.tokenizer.eos_token_id)
        text: str = self.tokenizer.decode([*ids[:begins], *written])
        return text


def _drawn(logits: Tensor, known: Tensor, generator: torch.Generator) -> int:
    """Draw an id out of the likeliest known ones."""
    best = torch.topk(logits[known] / TEMPERATURE, k=min(TOP_K, len(known)))
    drawn = torch.multinomial(best.values.softmax(dim=0), 1, generator=generator)
    return int(known[best.indices[drawn]])


def _until(ids: Sequence[int], end: int | None) -> list[int]:
    return list(ids[: ids.index(end)] if end in ids else ids)
