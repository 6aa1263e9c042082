from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from refocused.evaluate.tasks import Question, TaskFile, find_tasks, read_questions
from refocused.system.errors import ConfigError, EvaluationError

CHOICE = {"ctx": "A man sits.", "endings": ["He stands.", "He flies."], "label": 0}


def read(folder: Path, form: str, *rows: Any, limit: int | None = None) -> list[Question]:
    file = folder / "items.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    file.write_bytes(b"\n".join(lines))
    return read_questions(TaskFile("task", form, file), limit=limit)


def one(folder: Path, form: str, row: Any) -> tuple[str, tuple[str, ...], int]:
    (question,) = read(folder, form, row)
    return question.context, question.endings, question.answer


def test_hellaswag_is_put_as_its_own_code_puts_it(tmp_path: Path) -> None:
    row = {
        "activity_label": "Sailing",
        "ctx_a": "A boat. [header] How [title] it floats",
        "ctx_b": "THE crew",
        "ctx": "is not looked at",
        "endings": [" [step] swims.", "sinks  slowly.", "waits [substeps] here."],
        "label": "2",
    }
    assert one(tmp_path, "hellaswag", row) == (
        "Sailing: A boat. How. it floats The crew",
        (" swims.", "sinks slowly.", "waits here."),
        2,
    )


def test_hellaswag_without_its_halves_is_taken_as_it_stands(tmp_path: Path) -> None:
    row = CHOICE | {"activity_label": "Sitting", "ctx": "A man sits. he"}
    assert one(tmp_path, "hellaswag", row)[0] == "Sitting: A man sits. he"


def test_the_other_forms(tmp_path: Path) -> None:
    piqa = {"goal": "Boil water", "sol1": "Heat it", "sol2": "Cool it", "label": 1}
    wanted: Any = ("Question: Boil water\nAnswer:", ("Heat it", "Cool it"), 1)
    assert one(tmp_path, "piqa", piqa) == wanted
    wanted = ("He said  to", ("her",), 0)
    assert one(tmp_path, "lambada", {"text": "He said  to her"}) == wanted
    plain = CHOICE | {"ctx": "[x]  a "}
    assert one(tmp_path, "multiple_choice", plain) == ("[x]  a ", ("He stands.", "He flies."), 0)


ARC = {
    "question": "What is hot?",
    "choices": {"text": ["Ice", "Fire", "Snow"], "label": ["1", "2", "3"]},
    "answerKey": "2",
}
ARC_OF_AI2 = {
    "question": {
        "stem": "What is hot?",
        "choices": [{"text": "Ice", "label": "A"}, {"text": "Fire", "label": "B"}],
    },
    "answerKey": "B",
}


def test_forms_of_other_tools_are_told_by_their_fields(tmp_path: Path) -> None:
    """Whatever the task is called: harnesses dump all benchmarks in one form."""
    wanted: Any
    for form in ("hellaswag", "lambada", "multiple_choice"):
        query = {"query": "Sitting: A man", "choices": ["stands", "sits"], "gold": 1}
        assert one(tmp_path, form, query) == ("Sitting: A man", ("stands", "sits"), 1)
        wanted = ("He said to", ("her",), 0)
        for spaces in (("He said to", " her"), ("He said to ", "her"), ("He said to", "her")):
            row = dict(zip(("context", "continuation"), spaces, strict=True))
            assert one(tmp_path, form, row) == wanted
    context = "Question: What is hot?\nAnswer:"
    for form in ("arc_easy", "arc_challenge", "multiple_choice"):
        assert one(tmp_path, form, ARC) == (context, ("Ice", "Fire", "Snow"), 1)
        assert one(tmp_path, form, ARC_OF_AI2) == (context, ("Ice", "Fire"), 1)
    piqa = {"goal": "Boil water", "sol1": "Heat it", "sol2": "Cool it", "label": 1}
    wanted = ("Question: Boil water\nAnswer:", ("Heat it", "Cool it"), 1)
    assert one(tmp_path, "multiple_choice", piqa) == wanted


def test_the_first_item_decides_the_form_of_a_file(tmp_path: Path) -> None:
    rows = [{"query": "a", "choices": ["b", "c"], "gold": 0}, {"context": "a", "continuation": "b"}]
    with pytest.raises(EvaluationError, match=r":2: it has no list of texts `choices`.*: query, "):
        read(tmp_path, "multiple_choice", *rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "a", "choices": ["b", "c"], "gold": 2}, "its gold is 2, and a number from 0 to"),
        ({"context": "a", "continuation": " "}, "its continuation is empty"),
        (
            ARC | {"answerKey": "D"},
            r"its answerKey is 'D', and one of its labels \['1', '2', '3'\]",
        ),
        (ARC | {"choices": "Fire"}, "its `choices` are no texts with labels"),
        (
            ARC | {"choices": {"text": ["Ice", 2], "label": ["1", "2"]}},
            "no list of texts `choices`",
        ),
        (ARC | {"choices": {"text": ["Ice", "Fire"], "label": ["2"]}}, "its answerKey is '2'"),
        (ARC | {"question": 3}, "it has no text `stem`"),
    ],
)
def test_a_broken_item_of_another_form_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        read(tmp_path, "multiple_choice", row)


def test_the_limit_leaves_later_lines_unread(tmp_path: Path) -> None:
    questions = read(tmp_path, "multiple_choice", CHOICE, b"", CHOICE, b"{broken", limit=2)
    assert [question.place for question in questions] == [
        f"{tmp_path}/items.jsonl:1",
        f"{tmp_path}/items.jsonl:3",
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            b'{"ctx": "a"',
            r"items\.jsonl:2: it is no JSON object \(Expecting.*Every line is one item",
        ),
        (b'{"ctx": "\xff"}', "its byte 9 is no UTF-8"),
        ([1], "it is no JSON object"),
        (CHOICE | {"ctx": 3}, "it has no text `ctx`"),
        ({"ctx": "a", "label": 0}, "it has no list of texts `endings`"),
        (CHOICE | {"endings": []}, "it has 0 endings, and at least 2 are wanted"),
        (CHOICE | {"endings": ["one"]}, "it has 1 endings"),
        (CHOICE | {"endings": ["a", ""]}, "one of its endings is empty"),
        (CHOICE | {"label": 2}, "its label is 2, and a number from 0 to 1 is wanted"),
        (CHOICE | {"label": ""}, "its label is ''"),
        (CHOICE | {"label": True}, "its label is True"),
    ],
)
def test_a_broken_line_is_named_with_what_is_wrong(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        read(tmp_path, "multiple_choice", CHOICE, row)


def test_a_text_without_a_last_word_is_refused(tmp_path: Path) -> None:
    for text in ("word", "two words ", " word"):
        with pytest.raises(EvaluationError, match="no last word"):
            read(tmp_path, "lambada", {"text": text})


def test_a_file_without_items_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="has no items"):
        read(tmp_path, "piqa", b"", b"  ")


def names(tasks: list[TaskFile]) -> list[tuple[str, str, str]]:
    return [(task.name, task.form, task.file.name) for task in tasks]


def test_tasks_are_found_by_name_by_file_and_in_a_folder(tmp_path: Path) -> None:
    for name in ("hellaswag_val.jsonl", "lambada/test.jsonl", "wiki.txt", "more/play.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_tasks(["hellaswag", "lambada", "perplexity"], data=tmp_path)
    assert names(found) == [
        ("hellaswag", "hellaswag", "hellaswag_val.jsonl"),
        ("lambada", "lambada", "test.jsonl"),
        ("play", "perplexity", "play.txt"),
        ("wiki", "perplexity", "wiki.txt"),
    ]
    file = tmp_path / "hellaswag_val.jsonl"
    assert names(find_tasks([f"piqa={file}", str(file)], data=None)) == [
        ("piqa", "piqa", "hellaswag_val.jsonl"),
        ("hellaswag_val", "multiple_choice", "hellaswag_val.jsonl"),
    ]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ("helaswag", "task 'helaswag' is unknown; known are hellaswag, piqa, arc_easy"),
        ("arc=x.jsonl", "task 'arc' is unknown"),
        ("piqa=none.jsonl", r"none\.jsonl: there is no such file"),
        ("none.txt", r"none\.txt: there is no such file"),
        ("piqa", r"holds no piqa\*\.jsonl and no piqa/\*\.jsonl"),
        ("lambada", r"which of .*lambada_a\.jsonl, .*lambada_b\.jsonl is meant"),
    ],
)
def test_a_task_that_is_not_there_is_refused(tmp_path: Path, request_: str, message: str) -> None:
    for name in "ab":
        (tmp_path / f"lambada_{name}.jsonl").touch()
    with pytest.raises(ConfigError, match=message):
        find_tasks([request_], data=tmp_path)


def test_a_name_without_a_folder_and_a_name_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="task piqa: name its file, piqa=FILE"):
        find_tasks(["piqa"], data=None)
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError, match="a is there twice"):
        find_tasks([str(tmp_path / "a.txt")] * 2, data=None)
