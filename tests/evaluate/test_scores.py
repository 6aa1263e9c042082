from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from data.text_samples import word_file
from evaluate.harness import CONTEXT, MODELS, bytes_model
from thread_ranks import on_two_ranks, results
from torch import Tensor

from refocused.evaluate.continuations import (
    Continuation,
    Encoder,
    Scored,
    batches_by_length,
    score_all,
    tensors_of,
)
from refocused.evaluate.score_model import NetworkScorer
from refocused.models.head_loss import IGNORED_LABEL, label_scores
from refocused.system.errors import EvaluationError
from refocused.system.world import World
from refocused.tokenizers.encoders import TokenizerChoice
from refocused.tokenizers.tokenizer_json import as_transformers, tokenizer_file


def bytes_encoder(context: int = 12, *, end_of_text: bool = True) -> Encoder:
    content = tokenizer_file(TokenizerChoice("bytes"), vocabulary=257)
    tokenizer = as_transformers(content, end_of_text_id=256, max_length=context)
    if not end_of_text:
        tokenizer.bos_token = tokenizer.eos_token = None
    return Encoder(tokenizer, context_tokens=context, vocabulary=257)


def encoded(context: str, rest: str, **options: Any) -> Continuation | None:
    (one,) = bytes_encoder(**options).continuations(
        [(context, rest)], places=["items:4"], groups=[0]
    )
    return one


def test_the_context_gives_its_last_spaces_to_what_follows() -> None:
    assert encoded("ab", " cd") == Continuation(tuple(b"ab cd"), 3)
    assert encoded("ab ", " cd") == Continuation(tuple(b"ab  cd"), 4)


def test_an_empty_context_is_the_end_of_text() -> None:
    assert encoded("", " cd") == Continuation((256, *b" cd"), 3)
    assert encoded(" ", "cd") == Continuation((256, *b" cd"), 3)
    with pytest.raises(EvaluationError, match="items:4: the context is empty, and the tokenizer"):
        encoded("", " cd", end_of_text=False)


def test_a_long_context_loses_its_beginning_and_a_long_ending_is_left_out() -> None:
    assert encoded("0123456789abc", "xy") == Continuation(tuple(b"23456789abcxy"), 2, is_cut=True)
    # One token more than the model sees: the last label.
    assert encoded("0123456789", "xyz") == Continuation(tuple(b"0123456789xyz"), 3)
    assert encoded("a", "0123456789ab") is not None
    assert encoded("a", "0123456789abc") is None


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    content = word_file(tmp_path / "words.json").read_bytes()
    tokenizer = as_transformers(content, end_of_text_id=None, max_length=9)
    assert Encoder(tokenizer, context_tokens=9, vocabulary=4).encode(["the cat"]) == [[0, 1]]
    with pytest.raises(EvaluationError, match="has ids up to 3, and the model knows 3"):
        Encoder(tokenizer, context_tokens=9, vocabulary=3)


def test_an_ending_that_its_tokenizer_does_not_see_is_refused(tmp_path: Path) -> None:
    content = word_file(tmp_path / "words.json").read_bytes()
    tokenizer = as_transformers(content, end_of_text_id=None, max_length=9)
    encoder = Encoder(tokenizer, context_tokens=9, vocabulary=4)
    with pytest.raises(EvaluationError, match="an ending adds no token"):
        encoder.continuations([("the cat", "  ")], places=["items:1"], groups=[0])


def some(lengths: list[int]) -> list[Continuation]:
    draw = random.Random(1)
    return [
        Continuation(
            tuple(draw.choices(range(256), k=length)), draw.randint(1, length - 1), group=number
        )
        for number, length in enumerate(lengths)
    ]


def test_batches_are_of_like_length_and_within_their_tokens() -> None:
    lengths = [3, 9, 2, 5, 9, 4, 7]
    given = some(lengths)
    assert batches_by_length(given, rows=3) == [[1, 4, 6], [3, 5, 0], [2]]
    assert batches_by_length(given, rows=3, tokens=16) == [[1, 4], [6, 3], [5, 0, 2]]
    assert batches_by_length(given, rows=3, tokens=1) == [[n] for n in (1, 4, 6, 3, 5, 0, 2)]


def test_only_what_is_scored_has_labels() -> None:
    given = [Continuation((1, 2, 3, 4), 2), Continuation((5, 6), 1)]
    input_ids, labels = tensors_of(given)
    assert input_ids.tolist() == [[1, 2, 3], [5, 0, 0]]
    none = IGNORED_LABEL
    assert labels.tolist() == [[none, 3, 4], [6, none, none]]


def test_scores_are_those_of_each_alone_by_hand() -> None:
    network, _ = bytes_model()
    given = some([5, 20, 9, CONTEXT + 1, 2])
    found = score_all(given, NetworkScorer(network), rows=3, world=World())
    assert found is not None
    for one, scored in zip(given, found, strict=True):
        ids = torch.tensor([one.ids])
        with torch.no_grad():
            exact = network(ids[:, :-1]).logits[0].double().log_softmax(dim=-1)
        wanted = exact[torch.arange(len(one.ids) - 1), ids[0, 1:]][-one.scored :].sum()
        assert scored.log_probability == pytest.approx(float(wanted), rel=1e-5)
        assert not scored.is_greedy


@pytest.mark.parametrize("model", list(MODELS))
def test_endings_after_a_shared_beginning_score_as_alone(model: str) -> None:
    network, _ = MODELS[model]()
    draw = random.Random(2)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.choices(range(20), k=count))

    given = []
    for group, (context, cut) in enumerate([(40, 0), (3, 1), (90, 0), (12, 4)]):
        begin = tokens(context)
        for length in (2, 5, 1, 7):
            # Some contexts end differently: the tokens at a border depend on what follows.
            own = (*begin[: context - cut], *tokens(cut))
            given.append(Continuation((*own, *tokens(length)), length, group=group))
    scorer = NetworkScorer(network)
    together = score_all(given, scorer, rows=16, world=World())
    split = score_all(given, scorer, rows=3, world=World())
    alone = score_all(given, scorer, rows=1, world=World())
    assert together is not None and split is not None and alone is not None
    wanted = [one.log_probability for one in alone]
    assert [one.log_probability for one in together] == pytest.approx(wanted, rel=1e-5)
    assert [one.log_probability for one in split] == pytest.approx(wanted, rel=1e-5)


def test_what_the_model_would_write_is_greedy() -> None:
    network, _ = bytes_model()
    start = torch.tensor([[7, 8, 9]])
    written = network.generate(start, max_new_tokens=4, do_sample=False, pad_token_id=0)[0]
    given = [Continuation(tuple(written.tolist()), 4), Continuation((*written[:-1].tolist(), 1), 4)]
    found = score_all(given, NetworkScorer(network), rows=2, world=World())
    assert found is not None
    assert [one.is_greedy for one in found] == [True, False]


@pytest.mark.parametrize("at_once", [None, 1, 2, 100])
def test_label_scores_leave_the_padding_out_in_chunks_of_any_size(at_once: int | None) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 3, 4), torch.randn(8, 4)
    head[6:] = 9.0  # the padding is the likeliest of all
    labels = torch.tensor([[1, 5, -100], [-100, 0, 2]])
    sums, misses = label_scores(
        lambda rows: rows @ head.T, hidden, labels, vocabulary=6, rows_at_once=at_once
    )
    exact = (hidden @ head[:6].T).log_softmax(-1)
    wanted = [exact[0, 0, 1] + exact[0, 1, 5], exact[1, 1, 0] + exact[1, 2, 2]]
    assert sums.tolist() == pytest.approx([float(one) for one in wanted], rel=1e-5)
    best = exact.argmax(-1)
    assert misses.tolist() == [
        float((best[0, 0] != 1).int() + (best[0, 1] != 5).int()),
        float((best[1, 1] != 0).int() + (best[1, 2] != 2).int()),
    ]


def test_a_row_without_labels_scores_nothing() -> None:
    sums, misses = label_scores(
        torch.nn.Identity(), torch.zeros(1, 2, 3), torch.full((1, 2), -100), vocabulary=3
    )
    assert (sums.tolist(), misses.tolist()) == ([0.0], [0.0])


class Counting:
    """Scores a row by its first id; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        firsts = torch.tensor([one.ids[0] for one in batch], dtype=torch.float64)
        return -firsts, torch.zeros(len(batch))


def test_ranks_share_the_batches_and_call_as_often_as_each_other() -> None:
    given = [Continuation((number, 1), 1, group=number) for number in range(1, 6)]

    def action(world: World) -> tuple[list[Scored] | None, int]:
        scorer = Counting()
        return score_all(given, scorer, rows=2, world=world), scorer.calls

    for found, calls in results(on_two_ranks(action)):
        assert [one.log_probability for one in found] == [-1.0, -2.0, -3.0, -4.0, -5.0]
        assert calls == 2  # three batches


def test_a_stop_ends_it_after_the_batch() -> None:
    scorer = Counting()
    given = [Continuation((1, 1), 1)] * 9
    assert score_all(given, scorer, rows=1, world=World(), stopping=lambda: True) is None
    assert scorer.calls == 1
