"""CORE: prompts, draws and answers are nanochat's, item by item (on file)."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluate.core_bundle import ANSWERS, CONTEXT, TASKS, ours, write_bundle
from evaluate.harness import MODELS
from evaluate.small_models import bytes_tokenizer

from refocused.evaluate.continuations import Encoder, Scored
from refocused.evaluate.core import CoreTask, encode_items, encode_task, measures_of, read_bundle
from refocused.evaluate.tasks import CORE, TaskFile
from refocused.system.errors import EvaluationError

TEXT = "language_modeling"
ENCODER = Encoder(bytes_tokenizer(), context_tokens=64, vocabulary=300)


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
    # As `random.Random(1337).shuffle` of nanochat orders 24 lines, on file.
    file = bundle.parent / "eval_data" / "words.jsonl"
    contexts = [json.loads(line)["context"] for line in file.read_text().splitlines()]
    drawn = [contexts.index(item["context"]) for item in some[3].items]
    assert drawn == [13, 8, 2, 0, 22]


def test_prompts_show_other_items_with_their_answers() -> None:
    items = [{"query": f"q{n}", "choices": ["a", "b"], "gold": n % 2} for n in range(3)]
    task = CoreTask("t", "multiple_choice", items, examples=2, delimiter=": ")
    for number in range(3):
        for choice, prompt in zip("ab", task.prompts(number), strict=True):
            *shown, asked = prompt.split("\n\n")
            assert asked == f"q{number}: {choice}"
            others = {f"q{n}: {'ab'[n % 2]}" for n in range(3) if n != number}
            assert set(shown) == others
    text = [{"context": " c ", "continuation": "d"}, {"context": "e", "continuation": "f"}]
    task = CoreTask("t", TEXT, text, examples=1)
    assert task.prompts(0) == ["e f\n\nc", "e f\n\nc d"]
    assert list(task.scored_prompts()) == [["e f\n\nc d"], ["c d\n\ne f"]]


def answered(task: CoreTask, scores: list[tuple[float, bool]]) -> Any:
    items = encode_items(task, ENCODER)
    assert sum(len(choices) for _, choices in items) == len(scores)
    return measures_of({"t": (task.chance, items)}, [Scored(*score) for score in scores])


def test_accuracies_are_centred_on_chance() -> None:
    items = [{"query": "q", "choices": ["ab", "c"], "gold": 0} for _ in range(4)]
    task = CoreTask("t", "multiple_choice", items, chance=0.5)
    # The mean of the tokens decides: -3 of two beats -2 of one.
    right, wrong = [(-3.0, False), (-2.0, False)], [(-5.0, False), (-2.0, False)]
    measures = answered(task, [*right, *right, *right, *wrong])
    assert measures["t"].value == 0.75
    assert measures["CORE"].value == pytest.approx((0.75 - 0.5) / 0.5)
    assert measures["CORE"].standard_error == pytest.approx(measures["t"].standard_error / 0.5)
    chance = answered(task, [*right, *right, *wrong, *wrong])
    assert chance["CORE"].value == 0.0
    alike = [(-4.0, False), (-2.0, False)]  # the first of two alike
    assert answered(task, [*alike, *alike, *alike, *alike])["t"].value == 1.0


def test_equal_choices_have_the_loss_of_the_first() -> None:
    """Of 2,376 items of ARC easy 7 have two; last digits of their losses may differ."""
    items = [{"query": "q", "choices": ["a", "b", "b"], "gold": 1}]
    task = CoreTask("t", "multiple_choice", items, chance=0.25)
    scores = [(-3.0, False), (-2.0, False), (-1.9999999, False)]
    assert answered(task, scores)["t"].value == 1.0


@pytest.mark.parametrize(("gold", "right"), [(0, 1.0), (1, 0.0)])
def test_a_choice_without_tokens_is_taken_if_it_is_the_first(gold: int, right: float) -> None:
    """As nanochat's minimum of losses, of which that of no token is NaN."""
    items = [{"query": "q", "choices": ["a", "ab"], "gold": gold}]  # "a" begins "ab"
    task = CoreTask("t", "multiple_choice", items, chance=0.5)
    assert answered(task, [(0.0, True), (-1.0, True)])["t"].value == right


def test_items_whose_answer_is_longer_than_the_context_are_skipped(tmp_path: Path) -> None:
    text = [{"context": "a" * 10, "continuation": "b" * 70}, {"context": "a", "continuation": "b"}]
    task = CoreTask("t", TEXT, text)
    (item,) = encode_items(task, ENCODER)
    measures = measures_of({"t": (0.0, [item])}, [Scored(-1.0, True)])
    assert measures["t"].value == 1.0 and measures["t"].standard_error is None
    assert measures["CORE"].value == 1.0 and measures["CORE"].standard_error is None
    with pytest.raises(EvaluationError, match=r"t: the answers of all 1 items .* than the 64 of"):
        encode_items(CoreTask("t", TEXT, text[:1]), ENCODER)
    bundle = write_bundle(tmp_path / "bundle")
    (folder := bundle.parent / "eval_data").joinpath("words.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in [*text, *text])
    )
    assert folder.is_dir()
    encoded = encode_task(TaskFile(CORE, CORE, bundle), ENCODER)
    assert (encoded.items, encoded.skipped) == (4 * 24 + 2, 2)


def test_the_whole_bundle_becomes_one_task_whose_mean_is_its_first_measure(bundle: Path) -> None:
    encoded = encode_task(TaskFile(CORE, CORE, bundle), ENCODER, limit=6)
    assert encoded.items == 5 * 6
    result = encoded.result([Scored(-1.0, True)] * len(encoded.continuations))
    assert list(result.measures) == ["CORE", *(label for label, *_ in TASKS)]
    assert list(result.in_line) == ["CORE"] and result.cut > 0
    chances = {label: baseline / 100 for label, *_, baseline in TASKS}
    centred = [(result.measures[name].value - c) / (1 - c) for name, c in chances.items()]
    assert result.measures["CORE"].value == pytest.approx(sum(centred) / 5)


def no_file(bundle: Path) -> None:
    bundle.unlink()


def no_items(bundle: Path) -> None:
    (bundle.parent / "eval_data" / "schema.jsonl").write_text("\n")


def edit(name: str, before: str, after: str) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        text = (bundle.parent / name).read_text()
        assert re.search(before, text)
        (bundle.parent / name).write_text(re.sub(before, after, text, count=1))

    return change


def yaml(before: str, after: str) -> Callable[[Path], None]:
    return edit("core.yaml", before, after)


def words(before: str, after: str) -> Callable[[Path], None]:
    return edit("eval_data/words.jsonl", before, after)


NEEDS = r"core\.yaml: task \d needs the texts label, icl_task_type and dataset_uri, and num_fewshot"
CHANCE = r"eval_meta_data\.csv:\d: the `Random baseline` of the `Eval Task` "


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_file, r"core\.yaml: No such file.*Name the unpacked bundle"),
        (no_items, r"schema\.jsonl: schema has 0 items, and shows 1 others.* Take at least 2"),
        (yaml(r"schema\.jsonl", "gone.jsonl"), r"gone\.jsonl: No such file.* Name the unpacked"),
        (yaml('type": "schema"', 'type": "puzzle"'), r"core\.yaml: schema is of the type 'puzzle'"),
        (yaml("icl_tasks", "tasks"), r"core\.yaml: it has no list of tasks, icl_tasks"),
        (yaml(r"^\{.*", "a: b: c"), r"core\.yaml: line 1: "),
        (yaml('"label": "schema"', '"label": "words"'), r"core\.yaml: words is there twice"),
        (yaml('"label": "schema", ', ""), NEEDS),
        (yaml(r'"num_fewshot": \[1\]', '"num_fewshot": []'), NEEDS),
        (yaml(r'"num_fewshot": \[1\]', '"num_fewshot": [-1]'), NEEDS),
        (yaml(r'"num_fewshot": \[1\]', '"num_fewshot": ["1"]'), NEEDS),
        (yaml(r'"num_fewshot": \[1\]', '"num_fewshot": 1'), NEEDS),
        (yaml(r'"num_fewshot": \[1\]', '"num_fewshot": [24]'), "schema has 24 items, and shows 24"),
        (edit("eval_meta_data.csv", "words", "other"), CHANCE + "words is None"),
        (edit("eval_meta_data.csv", "Random", "Chance"), CHANCE + "choices is None"),
        (edit("eval_meta_data.csv", ",25.0", ",many"), CHANCE + "choices is 'many'"),
        (edit("eval_meta_data.csv", ",25.0", ",100"), CHANCE + "choices is '100'"),
        (edit("eval_meta_data.csv", ",25.0", ",nan"), CHANCE + "choices is 'nan'"),
        (words("context", "text"), r"words\.jsonl:1: it has no text `context`"),
        (words('"continuation": ".*"', '"continuation": 3'), r"words\.jsonl:1: it has no text"),
        (words(r"\Z", '[1, "a"]\n'), r"words\.jsonl:25: it is no JSON object \(it holds list"),
        (edit("eval_data/schema.jsonl", '"gold": 1', '"gold": 2'), "its gold is 2; expected"),
        (edit("eval_data/choices.jsonl", r'"gold": \d}', '"gold"}'), r"choices\.jsonl:1: it is no"),
        (edit("eval_data/choices.jsonl", r'"choices": \[.*?\]', '"choices": ["a"]'), "at least 2"),
    ],
)
def test_a_damaged_bundle_is_named_with_file_and_line(
    bundle: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(bundle)
    with pytest.raises(EvaluationError, match=message) as raised:
        encode_task(TaskFile(CORE, CORE, bundle), ENCODER)
    assert str(bundle.parent) in str(raised.value) and str(raised.value).endswith((".", ")."))


def test_what_is_not_utf_8_is_named(bundle: Path) -> None:
    for name in ("eval_data/words.jsonl", "eval_meta_data.csv", "core.yaml"):
        file = bundle.parent / name
        file.write_bytes(file.read_bytes() + b"\xff")
        with pytest.raises(EvaluationError, match=rf"{file.name}.* byte"):
            read_bundle(bundle)


def test_a_limit_below_the_examples_is_refused(bundle: Path) -> None:
    with pytest.raises(
        EvaluationError, match=r"words has 3 items, and shows 3 .* at least 4 \(--l"
    ):
        read_bundle(bundle, limit=3)


def test_a_tokenizer_without_an_end_of_text_token_is_refused(bundle: Path) -> None:
    encoder = Encoder(bytes_tokenizer(), context_tokens=64, vocabulary=300)
    encoder.end_of_text_id = None
    with pytest.raises(EvaluationError, match="choices: the tokenizer has no end-of-text token"):
        encode_task(TaskFile(CORE, CORE, bundle), encoder)
