"""A sample of what the model writes, as bytes, straight from the partitioned engine."""

from __future__ import annotations

import torch

from refocused.engine.engine import Engine

TEMPERATURE = 0.8
TOP_K = 40
BYTE_IDS = 256


def write_sample(
    engine: Engine, prompt: str, *, tokens: int, sequence_length: int, vocabulary: int, seed: int
) -> str:
    """Continue a prompt; every rank must call and gets the same text.

    Args:
        engine: A model whose ids below 256 are the bytes of UTF-8.
        prompt: Text to continue; not empty.
        tokens: Bytes to write.
        sequence_length: Longest context that the model was trained on.
        vocabulary: Ids that mean something; the padding above is never drawn.
        seed: Of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt.encode())
    for _ in range(tokens):
        context = torch.tensor([ids[-sequence_length:]])
        logits = engine.next_token_logits(context)[0, : min(vocabulary, BYTE_IDS)].cpu()
        best = torch.topk(logits / TEMPERATURE, k=min(TOP_K, len(logits)))
        drawn = torch.multinomial(best.values.softmax(dim=0), 1, generator=generator)
        ids.append(int(best.indices[drawn]))
    return bytes(ids).decode(errors="replace")
