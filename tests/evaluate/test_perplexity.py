from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluate.harness import CONTEXT, bytes_model
from evaluate.small_models import CONTEXT as POSITIONS
from evaluate.small_models import small_model
from evaluate.test_continuations import bytes_encoder

from refocused.evaluate.continuations import Continuation, Encoder, Scored
from refocused.evaluate.perplexity import measures_of, prepare, read_text, rolling_windows
from refocused.evaluate.score_model import Evaluation, NetworkScorer, Settings
from refocused.evaluate.tasks import TaskFile
from refocused.system.errors import EvaluationError
from refocused.system.world import World


def test_windows_score_every_token_once_with_as_much_before_it_as_fits() -> None:
    ids = list(range(1, 11))
    assert rolling_windows(ids, first=0, context=4, stride=4) == [
        Continuation((0, 1, 2, 3, 4), 4, group=0),
        Continuation((4, 5, 6, 7, 8), 4, group=1),
        Continuation((6, 7, 8, 9, 10), 2, group=2),
    ]
    assert rolling_windows(ids, first=0, context=4, stride=3) == [
        Continuation((0, 1, 2, 3, 4), 4, group=0),
        Continuation((3, 4, 5, 6, 7), 3, group=1),
        Continuation((6, 7, 8, 9, 10), 3, group=2),
    ]
    assert rolling_windows(ids[:3], first=None, context=4, stride=4) == [
        Continuation((1, 2, 3), 2, group=0)
    ]
    assert rolling_windows(ids[:1], first=None, context=4, stride=4) == []


@pytest.mark.parametrize(
    ("text", "end_of_text", "limit", "windows", "text_bytes"),
    [
        ("h\u00e9llo w\u00f6rld", True, None, 4, 13),  # 11 characters
        ("h\u00e9llo w\u00f6rld", True, 2, 2, 8),
        ("abcdefghi", False, None, 2, 8),
        ("abcdefghi", False, 1, 1, 4),
    ],
)
def test_a_limit_counts_the_bytes_of_what_it_leaves(
    text: str, end_of_text: bool, limit: int | None, windows: int, text_bytes: int
) -> None:
    found = prepare("t", text, bytes_encoder(context=4, end_of_text=end_of_text), limit=limit)
    assert found.items == windows
    measures = found.measure([Scored(-1.0, False)] * windows)
    by_byte = math.log(measures["byte_perplexity"].value)
    assert windows / by_byte == pytest.approx(text_bytes)  # the whole loss is one nat a window


@pytest.mark.parametrize("stride", [0, 13])
def test_a_stride_beyond_the_context_is_refused(stride: int) -> None:
    with pytest.raises(EvaluationError, match=f"--stride {stride}: a number from 1 to the context"):
        prepare("t", "text", bytes_encoder(context=12), stride=stride)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    with pytest.raises(EvaluationError, match="No such file"):
        read_text(file)
    file.write_bytes(b"abc\xff")
    with pytest.raises(EvaluationError, match="byte 3 is no UTF-8"):
        read_text(file)
    file.write_bytes(b"")
    with pytest.raises(EvaluationError, match="is empty"):
        read_text(file)
    with pytest.raises(EvaluationError, match="1 tokens, too few"):
        prepare("t", "a", bytes_encoder(end_of_text=False))


def test_perplexities_by_hand() -> None:
    windows = [Continuation((0,) * 5, 4), Continuation((0,) * 3, 2)]
    measures = measures_of(windows, [Scored(-8.0, False), Scored(-1.0, False)], text_bytes=12)
    assert measures["perplexity"].value == pytest.approx(math.exp(9 / 6))
    assert measures["byte_perplexity"].value == pytest.approx(math.exp(9 / 12))
    assert measures["bits_per_byte"].value == pytest.approx(9 / 12 / math.log(2))
    spread = (8 - 1.5 * 4) ** 2 + (1 - 1.5 * 2) ** 2
    error = math.sqrt(2 * spread) / 6
    assert measures["perplexity"].standard_error == pytest.approx(math.exp(1.5) * error)
    assert measures["bits_per_byte"].standard_error == pytest.approx(error / 2 / math.log(2))
    alone = measures_of(windows[:1], [Scored(-8.0, False)], text_bytes=4)
    assert alone["perplexity"].standard_error is None


def test_within_one_context_it_is_transformers_own_loss() -> None:
    network, tokenizer = bytes_model()
    encoder = Encoder(tokenizer, context_tokens=CONTEXT, vocabulary=257)
    text = "The cat sat on the mat, and then it ran away."
    taken = prepare("t", text, encoder).take(NetworkScorer(network), rows=4, world=World())
    ids = torch.tensor([[256, *text.encode()]])
    with torch.no_grad():
        loss = float(network(ids, labels=ids).loss)
    assert taken is not None
    assert taken.measures["perplexity"].value == pytest.approx(math.exp(loss), rel=1e-5)


def test_overlap_gives_later_tokens_their_context_back() -> None:
    network, tokenizer = bytes_model()
    encoder = Encoder(tokenizer, context_tokens=24, vocabulary=257)
    text = "the dog ran home and the cat sat, then it was fast"
    scorer = NetworkScorer(network)
    taken = prepare("t", text, encoder, stride=1).take(scorer, rows=8, world=World())
    ids = [256, *text.encode()]
    total = 0.0
    for place in range(1, len(ids)):
        seen = torch.tensor([ids[max(0, place - 24) : place]])
        with torch.no_grad():
            exact = network(seen).logits[0, -1].double().log_softmax(-1)
        total -= float(exact[ids[place]])
    wanted = math.exp(total / (len(ids) - 1))
    assert taken is not None
    assert taken.measures["perplexity"].value == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("family", ["resonance", "ten"])
def test_a_family_without_a_limit_reads_more_than_its_positions(
    tmp_path: Path, family: str
) -> None:
    shape: dict[str, Any] = {"learned_positions": False} if family == "ten" else {}
    model = small_model(family, **shape)
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(97 + place * place % 26) for place in range(3 * POSITIONS)))
    evaluation = Evaluation(model, Settings(context_tokens=4 * POSITIONS))
    (found,) = evaluation.run([TaskFile("text", "perplexity", file)], world=World())
    ids = torch.tensor([[256, *file.read_bytes()]])  # as a document begins
    with torch.no_grad():
        predicted = model.network(ids).logits[0, :-1].double().log_softmax(dim=-1)
    loss = -predicted.gather(1, ids[0, 1:, None]).mean()
    assert found.result.items == 1
    assert found.result.measures["perplexity"].value == pytest.approx(math.exp(loss), rel=1e-4)
    assert Evaluation(model, Settings()).context_tokens == POSITIONS


@pytest.mark.parametrize("family", ["gpt2", "ten"])
def test_a_family_with_learned_positions_reads_no_more_than_those(family: str) -> None:
    message = f"--context 65: {family} reads at most 64 tokens at once .*Take --context 64 or less"
    with pytest.raises(EvaluationError, match=message):
        Evaluation(small_model(family), Settings(context_tokens=POSITIONS + 1))
