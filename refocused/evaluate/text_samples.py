"""Text samples of a model in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from refocused.engine.engine import Engine

TOP_K = 40


@dataclasses.dataclass(frozen=True, slots=True)
class TextSampler:
    """Continues each prompt by up to `tokens` tokens, always from the same seed."""

    tokenizer: Any  # a transformers tokenizer
    prompts: Sequence[str]  # texts to continue; not empty
    tokens: int
    context_tokens: int  # longest context that the model is trained on
    seed: int
    temperature: float

    def write(
        self, engine: Engine, *, stopping: Callable[[], object] = lambda: False
    ) -> str | None:
        """Return each prompt and its continuation, up to the end of a text; every rank must call.

        A line of dashes separates those of several prompts.

        Only ids that the tokenizer knows are drawn, not the vocabulary's padding. `stopping` is
        called before each token, alike on all ranks; once it is true, None is returned.
        """
        known = torch.tensor(sorted(self.tokenizer.get_vocab().values()))
        end, texts = self.tokenizer.eos_token_id, list[str]()
        with engine.weights_gathered():
            for prompt in self.prompts:
                generator = torch.Generator().manual_seed(self.seed)
                ids = list(self.tokenizer(prompt)["input_ids"])
                begins = len(ids)
                # All tokens on all ranks: their numbers may differ in the last digits.
                for _ in range(self.tokens):
                    if stopping():
                        return None
                    context = torch.tensor([ids[-self.context_tokens :]])
                    logits = engine.next_token_logits(context)[0].cpu()[known]
                    best = torch.topk(logits / self.temperature, k=min(TOP_K, len(known)))
                    drawn = torch.multinomial(best.values.softmax(dim=0), 1, generator=generator)
                    ids.append(int(known[best.indices[drawn]]))
                ends = ids.index(end, begins) if end in ids[begins:] else len(ids)
                texts.append(self.tokenizer.decode(ids[:ends]))
        return "\n---\n".join(texts)
