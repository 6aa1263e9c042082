from __future__ import annotations

import dataclasses
import math

import pytest
from evaluate.small_models import ROWS, small_model

from refocused.evaluate.continuations import Encoder, Scored
from refocused.evaluate.multiple_choice import Measure, TaskResult, mean_of, measures_of, prepare
from refocused.evaluate.score_model import NetworkScorer
from refocused.evaluate.tasks import Question
from refocused.system.world import World


def scored(*sums: float) -> list[Scored]:
    return [Scored(total, is_greedy=False) for total in sums]


def test_the_sum_decides_acc_and_the_sum_by_character_decides_acc_norm() -> None:
    questions = [
        Question("c", ("four", "eightchr"), 0),  # -4 and -7; by character -1 and -0.875
        Question("c", ("four", "eightchr"), 1),
        Question("c", ("a", "b", "c"), 1),  # all alike: the first is taken
        Question("c", ("\u00e9\u00e9", "abcd"), 0),  # characters, not bytes: -1.5 and -1.75
    ]
    measures = measures_of(questions, scored(-4, -7, -4, -7, -1, -1, -1, -3, -7))
    assert measures["acc"].value == 2 / 4
    assert measures["acc_norm"].value == 2 / 4


def test_a_mean_has_the_standard_error_of_a_sample() -> None:
    found = mean_of([1.0, 0.0, 0.0, 1.0])
    assert found.value == 0.5
    assert found.standard_error == pytest.approx(math.sqrt((4 * 0.25) / 3) / 2)
    assert mean_of([1.0]) == Measure(1.0, None)


def test_last_words_are_right_when_written_and_their_perplexity_is_of_the_whole_word() -> None:
    questions = [Question("c", ("word",), 0)] * 2
    measures = measures_of(questions, [Scored(-1.0, True), Scored(-3.0, False)])
    assert measures["acc"].value == 0.5
    assert measures["perplexity"].value == pytest.approx(math.exp(2))
    assert measures["perplexity"].standard_error == pytest.approx(math.exp(2))


def test_questions_with_an_ending_longer_than_the_context_are_skipped_and_counted() -> None:
    model = small_model()
    encoder = Encoder(model.tokenizer, context_tokens=12, vocabulary=ROWS)
    fits = [Question("what is it", ("this", "that"), 0), Question("and", ("no", "yes"), 1)]
    longer = Question("what is it", ("this", "nothing of the sort"), 1)
    scorer = NetworkScorer(model.network)
    found = prepare("task", [fits[0], longer, fits[1]], encoder).take(scorer, rows=4, world=World())
    wanted = prepare("task", fits, encoder).take(scorer, rows=4, world=World())
    assert found is not None and wanted is not None
    assert found == dataclasses.replace(wanted, skipped=1)
    assert found.as_record()["skipped"] == 1
    none = prepare("task", [longer], encoder).take(scorer, rows=4, world=World())
    assert none == TaskResult("task", 0, 0, {}, skipped=1)
