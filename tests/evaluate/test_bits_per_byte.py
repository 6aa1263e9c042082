"""Bits per byte equal nanochat's and lm-evaluation-harness's, on any ranks and in any batches."""

import json
import math

import pytest
import torch
from bits_per_byte import ANSWERS, batches_of, lengths_of, ours, pairs_model, rolled
from thread_ranks import on_two_ranks, results

from refocused.evaluate.continuations import LossSums, ValidationLoss, bits_per_byte
from refocused.models.causal_lm import CausalLM
from refocused.system.world import World

ON_FILE = json.loads(ANSWERS.read_text())
LENGTHS = torch.tensor([1, 3, 0, 2], dtype=torch.int32)  # 2: a special token
SUM = math.log(2)  # nats of one bit


@pytest.fixture(scope="module")
def pairs():
    network, tokenizer = pairs_model()
    return CausalLM(network, chunk_tokens=50), tokenizer


@pytest.mark.parametrize(("name", "cut"), [("nanochat", batches_of), ("lm_eval", rolled)])
def test_it_is_what_other_programs_answer(pairs, name, cut):
    model, tokenizer = pairs
    batches = cut(tokenizer)
    pieces = [tokenizer.decode([number]) for _, labels in batches for number in labels[labels >= 0]]
    assert sum("\ufffd" in piece for piece in pieces) > 20  # no UTF-8 by themselves
    found = ours(model, lengths_of(tokenizer), batches)
    assert found.bits_per_byte == pytest.approx(ON_FILE[name], abs=1e-6)


def test_batches_and_ranks_do_not_change_it(pairs):
    model, tokenizer = pairs
    lengths, batches = lengths_of(tokenizer), batches_of(tokenizer)
    whole = ours(model, lengths, batches)
    rows = [
        (ids[None], marked[None]) for both in batches for ids, marked in zip(*both, strict=True)
    ]
    alone = ours(model, lengths, rows)

    def action(world):
        sums = LossSums(lengths)
        for ids, labels in rows[world.rank :: 2]:
            with torch.no_grad():
                sums.add(None, model(ids, labels, of_each=True), labels)
        return sums.mean(world)

    assert len(rows) > len(batches) > 1
    for found in (alone, *results(on_two_ranks(action))):
        assert found.bits_per_byte == pytest.approx(whole.bits_per_byte, rel=1e-6)
        assert found.mean == pytest.approx(whole.mean, rel=1e-6)


def summed(lengths, *batches):
    """Add batches of (source, losses in bits, labels)."""
    sums = LossSums(lengths)
    for source, bits, labels in batches:
        sums.add(source, torch.tensor([bits]) * SUM, torch.tensor([labels]))
    return sums.mean(World())


def test_special_tokens_are_in_neither_sum_and_what_is_left_out_in_no_figure():
    found = summed(LENGTHS, (None, [1.0, 3.0, 90.0, 5.0, 0.0], [0, 1, 2, 3, -100]))
    assert found == ValidationLoss(pytest.approx(99 / 4 * SUM), pytest.approx(9 / 6))
    assert bits_per_byte(9 * SUM, 6) == pytest.approx(9 / 6)


def test_sources_have_their_own():
    code, web = ("code", [1.0, 2.0], [0, 0]), ("web", [6.0, 50.0], [1, 2])
    found = summed(LENGTHS, code, web, ("none", [0.0], [-100]))
    assert found.bits_per_byte == pytest.approx(9 / 5)
    shown = {name: loss.bits_per_byte for name, loss in found.by_source.items()}
    assert shown == {"code": pytest.approx(3 / 2), "web": pytest.approx(2)}


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_it_is_unknown_without_lengths_or_without_text(lengths):
    label = 0 if lengths is None else 2  # special tokens alone
    assert summed(lengths, (None, [1.0], [label])) == ValidationLoss(pytest.approx(SUM))
    assert summed(lengths, (None, [0.0], [-100])) is None
