from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from refocused.engine.engine import Engine
from refocused.training.sample import BYTE_IDS, TOP_K, write_sample


class ScriptedEngine:
    """Predicts from a table; notes the contexts that it was shown."""

    def __init__(self, vocabulary: int = 512) -> None:
        self.contexts: list[list[int]] = []
        self.vocabulary = vocabulary

    def next_token_logits(self, input_ids: Tensor) -> Tensor:
        self.contexts.append(input_ids[0].tolist())
        logits = torch.full((1, self.vocabulary), -20.0)
        logits[0, (int(input_ids[0, -1]) + 1) % BYTE_IDS] = 20.0
        logits[0, BYTE_IDS:] = 50.0  # ids that are no bytes are the likeliest of all
        return logits


def sample(engine: object, prompt: str, *, tokens: int, length: int = 8, seed: int = 0) -> str:
    return write_sample(
        cast("Engine", engine),
        prompt,
        tokens=tokens,
        sequence_length=length,
        vocabulary=512,
        seed=seed,
    )


def test_the_likely_bytes_follow_the_prompt_and_nothing_that_is_no_byte() -> None:
    assert sample(ScriptedEngine(), "ab", tokens=5) == "abcdefg"


def test_the_context_is_no_longer_than_what_was_trained_on() -> None:
    engine = ScriptedEngine()
    sample(engine, "abc", tokens=4, length=4)
    assert [len(context) for context in engine.contexts] == [3, 4, 4, 4]
    assert engine.contexts[-1] == list(b"cdef")


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert sample(ScriptedEngine(), "\x7f", tokens=1) == "\x7f\ufffd"


class EvenEngine(ScriptedEngine):
    """Finds the letters from `A` on ever less likely, by very little."""

    def next_token_logits(self, input_ids: Tensor) -> Tensor:
        logits = torch.full((1, self.vocabulary), -1.0)
        logits[0, 65 : 65 + 60] = -torch.arange(60) / 1000
        return logits


def test_draws_repeat_with_their_seed_and_come_from_the_likeliest() -> None:
    text = sample(EvenEngine(), "A", tokens=300)
    assert text == sample(EvenEngine(), "A", tokens=300)
    assert text != sample(EvenEngine(), "A", tokens=300, seed=1)
    assert {*text} == {chr(65 + place) for place in range(TOP_K)}
