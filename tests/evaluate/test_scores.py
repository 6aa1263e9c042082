"""Scores equal those of lm-evaluation-harness, on file and (if installed) computed."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from data.text_samples import word_file
from evaluate.harness import CONTEXT, MODELS, SCORES, ask, bytes_model
from evaluate.small_models import CONTEXT as POSITIONS
from evaluate.small_models import small_model
from thread_ranks import on_two_ranks, results

from refocused.evaluate import multiple_choice
from refocused.evaluate.continuations import (
    Continuation,
    Encoder,
    Scored,
    batches_by_length,
    score_all,
)
from refocused.evaluate.load_model import LoadedModel
from refocused.evaluate.multiple_choice import TaskResult, measures_of
from refocused.evaluate.score_model import (
    Evaluation,
    NetworkScorer,
    perplexities_of,
    prepare_text,
    read_text,
)
from refocused.evaluate.tasks import Question, TaskFile, read_questions
from refocused.models.head_loss import label_scores
from refocused.system.errors import EvaluationError
from refocused.system.world import World
from refocused.tokenizers.encoders import TokenizerChoice
from refocused.tokenizers.tokenizer_json import as_transformers, tokenizer_file

ON_FILE: dict[str, Any] = json.loads(SCORES.read_text())


def bytes_encoder(context=12, *, end_of_text=True):
    content = tokenizer_file(TokenizerChoice("bytes"), vocabulary=257)
    tokenizer = as_transformers(content, end_of_text_id=256, max_length=context)
    if not end_of_text:
        tokenizer.bos_token = tokenizer.eos_token = None
    return Encoder(tokenizer, context_tokens=context, vocabulary=257)


@pytest.mark.parametrize(
    ("context", "rest", "wanted"),
    [
        ("ab", " cd", Continuation(tuple(b"ab cd"), 3)),
        # Trailing spaces belong to the continuation.
        ("ab ", " cd", Continuation(tuple(b"ab  cd"), 4)),
        ("", " cd", Continuation((256, *b" cd"), 3)),
        (" ", "cd", Continuation((256, *b" cd"), 3)),
        ("0123456789abc", "xy", Continuation(tuple(b"23456789abcxy"), 2, is_cut=True)),
        # One token more than the context: the last label.
        ("0123456789", "xyz", Continuation(tuple(b"0123456789xyz"), 3)),
        ("a", "0123456789ab", Continuation(tuple(b"a0123456789ab"), 12)),
        ("a", "0123456789abc", None),
    ],
)
def test_a_context_and_what_follows_are_encoded(context, rest, wanted):
    found = bytes_encoder().continuations([(context, rest)], places=["items:4"])
    assert found == [wanted]


def test_unencodable_items_are_rejected(tmp_path):
    with pytest.raises(EvaluationError, match="items:4: the context is empty, and the tokenizer"):
        bytes_encoder(end_of_text=False).continuations([("", "c")], places=["items:4"])
    content = word_file(tmp_path / "words.json").read_bytes()
    tokenizer = as_transformers(content, end_of_text_id=None, max_length=9)
    assert Encoder(tokenizer, context_tokens=9, vocabulary=4).encode(["the cat"]) == [[0, 1]]
    with pytest.raises(EvaluationError, match="ids up to 3, but the model's vocabulary has only 3"):
        Encoder(tokenizer, context_tokens=9, vocabulary=3)


def test_an_item_whose_ending_lies_inside_a_token_is_skipped(tmp_path):
    content = json.loads(word_file(tmp_path / "words.json").read_bytes())
    content["pre_tokenizer"] = None  # so that a token may span the join
    content["model"]["vocab"] = {"cat a": 0, "cat": 1, "cat b c": 2, "[UNK]": 3}
    tokenizer = as_transformers(json.dumps(content).encode(), end_of_text_id=None, max_length=9)
    encoder = Encoder(tokenizer, context_tokens=9, vocabulary=9)
    assert encoder.encode(["cat", "cat a"]) == [[1], [0]]
    questions = [Question("cat", ("a", "b"), 0, place="items:1")]
    examination = multiple_choice.prepare("mine", questions, encoder)
    assert (examination.items, examination.skipped) == (0, 1)


def test_batches_are_of_like_length_and_within_their_tokens():
    lengths = [3, 9, 2, 5, 9, 4, 7]
    given = [Continuation((1,) * length, 1) for n, length in enumerate(lengths)]
    assert batches_by_length(given, rows=3) == [[1, 4, 6], [3, 5, 0], [2]]
    assert batches_by_length(given, rows=3, tokens=16) == [[1, 4], [6, 3], [5, 0, 2]]
    assert batches_by_length(given, rows=3, tokens=1) == [[n] for n in (1, 4, 6, 3, 5, 0, 2)]


@pytest.mark.parametrize("at_once", [None, 1, 2, 100])
def test_label_scores_ignore_the_padding_in_chunks_of_any_size(at_once):
    torch.manual_seed(0)
    hidden, head = torch.randn(3, 3, 4), torch.randn(8, 4)
    head[6:] = 9.0  # padding is the likeliest
    labels = torch.tensor([[1, 5, -100], [-100, 0, 2], [-100, -100, -100]])
    sums, misses = label_scores(
        lambda rows: rows @ head.T, hidden, labels, vocabulary=6, rows_at_once=at_once
    )
    exact = (hidden @ head[:6].T).log_softmax(-1)
    wanted = [exact[0, 0, 1] + exact[0, 1, 5], exact[1, 1, 0] + exact[1, 2, 2], 0.0]
    assert sums.tolist() == pytest.approx([float(one) for one in wanted], rel=1e-5)
    missed = (exact.argmax(-1) != labels) & (labels >= 0)
    assert misses.tolist() == missed.sum(-1).tolist()


class Counting:
    """Scores a row by its first id; counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, batch):
        self.calls += 1
        firsts = torch.tensor([one.ids[0] for one in batch], dtype=torch.float64)
        return -firsts, torch.zeros(len(batch))


def test_ranks_share_the_batches_and_make_equal_numbers_of_calls():
    given = [Continuation((number, 1), 1) for number in range(1, 6)]

    def action(world):
        scorer = Counting()
        return score_all(given, scorer, rows=2, world=world), scorer.calls

    for found, calls in results(on_two_ranks(action)):
        assert [one.log_probability for one in found] == [-1.0, -2.0, -3.0, -4.0, -5.0]
        assert calls == 2  # three batches


def test_the_sum_decides_acc_and_the_sum_by_character_decides_acc_norm():
    questions = [
        Question("c", ("four", "eightchr"), 0),  # -4 and -7; by character -1 and -0.875
        Question("c", ("four", "eightchr"), 1),
        Question("c", ("a", "b", "c"), 1),  # all alike: the first is taken
        Question("c", ("\u00e9\u00e9", "abcd"), 0),  # characters, not bytes: -1.5 and -1.75
    ]
    sums = (-4, -7, -4, -7, -1, -1, -1, -3, -7)
    measures = measures_of(questions, [Scored(total, is_greedy=False) for total in sums])
    assert measures["acc"].value == measures["acc_norm"].value == 2 / 4
    assert measures["acc"].standard_error == pytest.approx(math.sqrt((4 * 0.25) / 3) / 2)
    alone = measures_of(questions[:1], [Scored(total, is_greedy=False) for total in sums[:2]])
    assert alone["acc"].standard_error is None


def test_questions_beyond_the_context_are_skipped_and_counted():
    encoder = bytes_encoder(context=12)
    fits = [Question("what is it", ("this", "that"), 0), Question("and", ("no", "yes"), 1)]
    longer = Question("what is it", ("this", "nothing of the sort"), 1)
    without = multiple_choice.prepare("task", fits, encoder)
    one = multiple_choice.prepare("task", [fits[0], longer, fits[1]], encoder)
    assert (one.items, one.continuations, one.skipped) == (2, without.continuations, 1)
    scored = [Scored(-1.0, False)] * 4
    assert one.result(scored) == dataclasses.replace(without.result(scored), skipped=1)
    alone = multiple_choice.prepare("task", [longer], encoder)
    assert alone.result([]) == TaskResult("task", 0, 0, {}, skipped=1)


@pytest.mark.parametrize(
    ("text", "end_of_text", "limit", "sequences", "text_bytes"),
    [
        ("h\u00e9llo w\u00f6rld", True, None, 4, 13),  # 11 characters
        ("h\u00e9llo w\u00f6rld", True, 2, 2, 8),
        ("abcdefghi", False, None, 2, 8),
        ("abcdefghi", False, 1, 1, 4),
    ],
)
def test_a_limit_counts_the_bytes_of_the_scored_text(
    text, end_of_text, limit, sequences, text_bytes
):
    encoder = bytes_encoder(context=4, end_of_text=end_of_text)
    found = prepare_text("t", text, encoder, limit=limit)
    assert found.items == sequences
    measures = found.measure([Scored(-1.0, False)] * sequences)
    by_byte = math.log(measures["byte_perplexity"].value)
    assert sequences / by_byte == pytest.approx(text_bytes)  # the whole loss is one nat a sequence


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, {}, "No such file"),
        (b"abc\xff", {}, "byte 3 is not UTF-8"),
        (b"", {}, "is empty"),
        (b"a", {}, "1 tokens, too few"),
        (b"text", {"stride": 0}, "--stride 0: a number from 1 to the context"),
        (b"text", {"stride": 13}, "--stride 13: a number from 1 to the context"),
    ],
)
def test_an_unscorable_text_is_rejected(tmp_path, content, options, message):
    file = tmp_path / "a.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(EvaluationError, match=message):
        text = read_text(file)
        prepare_text("t", text, bytes_encoder(end_of_text=False), **options)


def test_standard_errors_of_perplexities_by_hand():
    sequences = [Continuation((0,) * 5, 4), Continuation((0,) * 3, 2)]
    scored = [Scored(-8.0, False), Scored(-1.0, False)]
    measures = perplexities_of(sequences, scored, text_bytes=12)
    spread = (8 - 1.5 * 4) ** 2 + (1 - 1.5 * 2) ** 2
    error = math.sqrt(2 * spread) / 6
    assert measures["perplexity"].standard_error == pytest.approx(math.exp(1.5) * error)
    assert measures["bits_per_byte"].standard_error == pytest.approx(error / 2 / math.log(2))
    alone = perplexities_of(sequences[:1], scored[:1], text_bytes=4)
    assert alone["perplexity"].standard_error is None
    scored = [Scored(-1.0, True), Scored(-3.0, False)]
    words = measures_of([Question("c", ("word",), 0)] * 2, scored)
    assert words["perplexity"].standard_error == pytest.approx(math.exp(2))


def test_every_token_is_scored_with_its_whole_context():
    (network, tokenizer), context = bytes_model(), 24
    encoder = Encoder(tokenizer, context_tokens=context, vocabulary=257)
    text = "the dog ran home and the cat sat, then it was fast"
    examination = prepare_text("t", text, encoder, stride=1)
    sequences, scorer = examination.continuations, NetworkScorer(network)
    result = examination.result(score_all(sequences, scorer, rows=8, world=World()) or ())
    ids = [256, *text.encode()]
    total = 0.0
    for place in range(1, len(ids)):
        seen = torch.tensor([ids[max(0, place - context) : place]])
        with torch.no_grad():
            exact = network(seen).logits[0, -1].double().log_softmax(-1)
        total -= float(exact[ids[place]])
    expected = math.exp(total / (len(ids) - 1))
    assert result.measures["perplexity"].value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["resonance", "ten"])
def test_a_family_without_a_limit_reads_beyond_its_positions(tmp_path, family):
    shape: dict[str, Any] = {"learned_positions": False} if family == "ten" else {}
    model = small_model(family, **shape)
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(97 + place * place % 26) for place in range(3 * POSITIONS)))
    evaluation = Evaluation(model, context=4 * POSITIONS)
    (found,) = evaluation.run([TaskFile("text", "perplexity", file)], world=World())
    ids = torch.tensor([[256, *file.read_bytes()]])  # as a document begins
    with torch.no_grad():
        predicted = model.network(ids).logits[0, :-1].double().log_softmax(dim=-1)
    loss = -predicted.gather(1, ids[0, 1:, None]).mean()
    assert found.items == 1
    assert found.measures["perplexity"].value == pytest.approx(math.exp(loss), rel=1e-4)
    assert Evaluation(model).context_tokens == POSITIONS


@pytest.mark.parametrize("family", ["gpt2", "nanochat", "ten"])
def test_a_family_with_learned_positions_reads_no_further(family):
    message = f"--context 65: {family} reads at most 64 tokens at once .*Take --context 64 or less"
    with pytest.raises(EvaluationError, match=message):
        Evaluation(small_model(family), context=POSITIONS + 1)


@pytest.fixture(scope="module", params=list(MODELS))
def model(request):
    network, tokenizer = MODELS[request.param]()
    return request.param, LoadedModel(network, tokenizer, Path(), {})


@pytest.mark.parametrize("form", list(ON_FILE["items"]))
def test_every_figure_equals_the_harness(model, tmp_path, form):
    name, loaded = model
    rows = ON_FILE["items"][form]
    is_text = form == "perplexity"
    task = TaskFile(form, form, tmp_path / ("text.txt" if is_text else "items.jsonl"))
    lines = rows[0]["text"] if is_text else "".join(json.dumps(row) + "\n" for row in rows)
    task.file.write_text(lines, encoding="utf-8")
    wanted = dict(ON_FILE["scores"][name][form])
    encoder = Encoder(
        loaded.tokenizer, context_tokens=CONTEXT, vocabulary=loaded.network.config.vocab_size
    )
    if is_text:
        one = prepare_text("text", read_text(task.file), encoder)
    else:
        one = multiple_choice.prepare("task", read_questions(task), encoder)
    scorer = NetworkScorer(loaded.network)
    scored = score_all(one.continuations, scorer, rows=13, world=World()) or ()
    sums = [single.log_probability for single in scored]
    exact = pytest.approx(wanted.pop("log_probabilities"), rel=1e-5, abs=1e-4)
    assert ([sum(sums)] if is_text else sums) == exact
    evaluation = Evaluation(loaded, batch=13)
    assert evaluation.context_tokens == CONTEXT
    (timed,) = evaluation.run([task], world=World())
    for key, value in wanted.items():
        measure = timed.measures[key.removesuffix("_stderr")]
        found = measure.standard_error if key.endswith("_stderr") else measure.value
        tolerance = 1e-5 if key.endswith(("perplexity", "byte")) else 1e-12
        assert found == pytest.approx(value, rel=tolerance), key


@pytest.mark.slow
def test_the_figures_on_file_equal_the_harness(model):
    pytest.importorskip("lm_eval", reason="needs pip install .[parity]")
    name, _ = model
    found = ask(name, ON_FILE["items"])
    for task, wanted in ON_FILE["scores"][name].items():
        for key, value in wanted.items():
            assert found[task][key] == pytest.approx(value, rel=1e-5), (task, key)
