"""CORE: prompts, draws and answers are nanochat's, item by item (on file)."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluate.core_bundle import ANSWERS, CONTEXT, TASKS, ours, write_bundle
from evaluate.harness import MODELS
from evaluate.small_models import bytes_tokenizer

from refocused.evaluate.continuations import Encoder, Scored
from refocused.evaluate.core import CORE, CoreTask, measures_of, prepare_tasks, read_bundle
from refocused.system.errors import EvaluationError


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_of_nanochats_code_item_by_item(model: str, bundle: Path) -> None:
    recorded: dict[str, str] = json.loads(ANSWERS.read_text())[model]
    assert {label for label, *_ in TASKS} == recorded.keys()
    assert sum(answers.count("1") for answers in recorded.values()) > 20
    assert ours(*MODELS[model](), read_bundle(bundle), CONTEXT) == recorded


def test_a_limit_draws_the_same_items_as_max_per_task(bundle: Path) -> None:
    whole, some = read_bundle(bundle), read_bundle(bundle, limit=5)
    for task, first in zip(whole, some, strict=True):
        assert first.items == task.items[:5] and len(task.items) == 24
        file = bundle / "eval_data" / f"{task.label}.jsonl"
        in_order = [json.loads(line) for line in file.read_text().splitlines()]
        assert task.items != in_order and sorted(map(str, task.items)) == sorted(map(str, in_order))


def test_prompts_show_other_items_with_their_answers() -> None:
    items = [{"query": f"q{n}", "choices": ["a", "b"], "gold": n % 2} for n in range(3)]
    task = CoreTask("t", "multiple_choice", 2, ": ", 0.5, items)
    for number in range(3):
        for choice, prompt in zip("ab", task.prompts(number), strict=True):
            *shown, asked = prompt.split("\n\n")
            assert asked == f"q{number}: {choice}"
            others = {f"q{n}: {'ab'[n % 2]}" for n in range(3) if n != number}
            assert set(shown) == others
    text = [{"context": " c ", "continuation": "d"}, {"context": "e", "continuation": "f"}]
    without, whole = CoreTask("t", "language_modeling", 1, " ", 0.0, text).prompts(0)
    assert (without, whole) == ("e f\n\nc", "e f\n\nc d")


def answered(task: CoreTask, scores: list[tuple[float, bool]]) -> Any:
    encoder = Encoder(bytes_tokenizer(), context_tokens=64, vocabulary=300)
    tasks, continuations, _ = prepare_tasks("core", [task], encoder)
    assert len(continuations) == len(scores)
    return measures_of(tasks, [Scored(*score) for score in scores])


def test_accuracies_are_centred_on_chance() -> None:
    items = [{"query": "q", "choices": ["ab", "c"], "gold": 0} for _ in range(4)]
    task = CoreTask("t", "multiple_choice", 0, " ", 0.5, items)
    # The mean of the tokens decides: -3 of two beats -2 of one.
    right, wrong = [(-3.0, False), (-2.0, False)], [(-5.0, False), (-2.0, False)]
    measures = answered(task, [*right, *right, *right, *wrong])
    assert measures["t"].value == 0.75
    assert measures[CORE].value == pytest.approx((0.75 - 0.5) / 0.5)
    assert measures[CORE].standard_error == pytest.approx(measures["t"].standard_error / 0.5)
    chance = answered(task, [*right, *right, *wrong, *wrong])
    assert chance[CORE].value == 0.0
    # The first of two alike; without a token, as nanochat's NaN.
    alike = [(-4.0, False), (-2.0, False)]
    assert answered(task, [*alike, *alike, *alike, *alike])["t"].value == 1.0


def test_a_task_too_long_for_the_context_counts_its_items_as_skipped() -> None:
    text = [{"context": "a" * 10, "continuation": "b" * 70}, {"context": "a", "continuation": "b"}]
    task = CoreTask("t", "language_modeling", 0, " ", 0.0, text)
    encoder = Encoder(bytes_tokenizer(), context_tokens=64, vocabulary=300)
    tasks, continuations, skipped = prepare_tasks("core", [task], encoder)
    assert (len(continuations), skipped) == (1, 1)
    measures = measures_of(tasks, [Scored(-1.0, True)])
    assert measures["t"].value == 1.0 and measures["t"].standard_error is None
    assert measures[CORE].standard_error is None and not math.isnan(measures[CORE].value)


def no_file(bundle: Path) -> None:
    (bundle / "core.yaml").unlink()


def no_items(bundle: Path) -> None:
    (bundle / "eval_data" / "schema.jsonl").write_text("\n")


def edit(name: str, before: str, after: str) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        text = (bundle / name).read_text()
        assert before in text
        (bundle / name).write_text(text.replace(before, after))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_file, r"core\.yaml: No such file.*Name the unpacked bundle"),
        (no_items, "schema has 0 items, and its prompts show 1 others. Take at least 2"),
        (edit("core.yaml", "schema.jsonl", "gone.jsonl"), r"gone\.jsonl: No such file"),
        (
            edit("core.yaml", '"icl_task_type": "schema', '"icl_task_type": "puzzle'),
            "task type 'puzzle' is unknown",
        ),
        (edit("core.yaml", "icl_tasks", "tasks"), "has another format than DCLM's bundle"),
        (edit("eval_meta_data.csv", "words", "other"), "has no random baseline of words"),
        (edit("eval_meta_data.csv", ",25.0", ",many"), "has another format than DCLM's bundle"),
        (edit("eval_data/words.jsonl", "context", "text"), r"words\.jsonl:1: the item has no con"),
        (edit("eval_data/schema.jsonl", '"gold": 1', '"gold": 2'), "gold is 2; expected 0 to 1"),
        (edit("eval_data/choices.jsonl", '"gold": 1}', '"gold": 1'), r"choices\.jsonl:\d+: "),
    ],
)
def test_a_damaged_bundle_is_named(
    bundle: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(bundle)
    with pytest.raises(EvaluationError, match=message):
        read_bundle(bundle)


def test_a_tokenizer_without_an_end_of_text_token_is_refused(bundle: Path) -> None:
    encoder = Encoder(bytes_tokenizer(), context_tokens=64, vocabulary=300)
    encoder.end_of_text_id = None
    with pytest.raises(EvaluationError, match="no end-of-text token"):
        prepare_tasks("core", read_bundle(bundle), encoder)
