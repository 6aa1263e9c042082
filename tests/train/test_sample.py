from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from data.text_samples import word_file
from torch import Tensor

from refocused.engine.engine import Engine
from refocused.tokenizers.encoders import TokenizerChoice
from refocused.tokenizers.tokenizer_json import as_transformers, tokenizer_file
from refocused.train.step.evaluation import TOP_K, TextSampler

END = 256


class ScriptedEngine:
    """Predicts from a table; notes the contexts that it was shown."""

    def __init__(self, vocabulary: int = 512) -> None:
        self.contexts: list[list[int]] = []
        self.vocabulary = vocabulary
        self.held = 0

    @contextlib.contextmanager
    def weights_held(self) -> Iterator[None]:
        self.held += 1
        yield

    def next_token_logits(self, input_ids: Tensor) -> Tensor:
        self.contexts.append(input_ids[0].tolist())
        logits = torch.full((1, self.vocabulary), -20.0)
        last = int(input_ids[0, -1])
        logits[0, END if last == ord("~") else last + 1] = 20.0
        logits[0, END + 1 :] = 50.0  # ids that mean nothing are the likeliest of all
        return logits


def bytes_tokenizer() -> Any:
    content = tokenizer_file(TokenizerChoice("bytes"), vocabulary=512)
    return as_transformers(content, end_of_text_id=None, max_length=64)


def sample(engine: object, prompt: str, *, tokens: int, length: int = 8, seed: int = 0) -> str:
    sampler = TextSampler(bytes_tokenizer(), prompt, tokens, context_tokens=length, seed=seed)
    text = sampler.write(cast("Engine", engine))
    assert text is not None
    return text


def test_the_likely_bytes_follow_the_prompt_and_nothing_without_a_meaning() -> None:
    assert sample(ScriptedEngine(), "ab", tokens=5) == "abcdefg"


def test_the_context_is_no_longer_than_what_was_trained_on() -> None:
    engine = ScriptedEngine()
    sample(engine, "abc", tokens=4, length=4)
    assert [len(context) for context in engine.contexts] == [3, 4, 4, 4]
    assert engine.contexts[-1] == list(b"cdef")


def test_the_weights_are_gathered_once_for_all_tokens() -> None:
    engine = ScriptedEngine()
    sample(engine, "ab", tokens=5)
    assert (engine.held, len(engine.contexts)) == (1, 5)


def test_a_text_that_ends_is_written_up_to_there() -> None:
    engine = ScriptedEngine()
    assert sample(engine, "{", tokens=5) == "{|}~"
    assert len(engine.contexts) == 5  # by every rank, whichever of them sees the end


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert sample(ScriptedEngine(), "\x7f", tokens=1) == "\x7f\ufffd"


def test_a_stop_ends_it() -> None:
    sampler = TextSampler(bytes_tokenizer(), "a", 50, context_tokens=8, seed=0)
    engine = ScriptedEngine()

    def stopping() -> bool:
        return len(engine.contexts) == 3

    assert sampler.write(cast("Engine", engine), stopping=stopping) is None
    assert len(engine.contexts) == 3


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


def test_any_tokenizer_writes(tmp_path: Path) -> None:
    class Cats(ScriptedEngine):
        def next_token_logits(self, input_ids: Tensor) -> Tensor:
            logits = torch.zeros(1, 8)
            logits[0, 1] = 90.0
            return logits

    content = word_file(tmp_path / "words.json").read_bytes()
    tokenizer = as_transformers(content, end_of_text_id=None, max_length=9)
    sampler = TextSampler(tokenizer, "the", 3, context_tokens=9, seed=0)
    assert sampler.write(cast("Engine", Cats())) == "the cat cat cat"
