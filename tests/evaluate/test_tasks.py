import json
from pathlib import Path
from typing import Any

import pytest

from refocused.evaluate.tasks import TaskFile, find_tasks, read_questions
from refocused.system.errors import ConfigError, EvaluationError

CHOICE = {"ctx": "A man sits.", "endings": ["He stands.", "He flies."], "label": 0}


def read(folder, form, *rows, limit=None):
    file = folder / "items.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    file.write_bytes(b"\n".join(lines))
    return read_questions(TaskFile("task", form, file), limit=limit)


SAILING = {
    "activity_label": "Sailing",
    "ctx_a": "A boat. [header] How [title] it floats",
    "ctx_b": "THE crew",
    "ctx": "is not looked at",
    "endings": [" [step] swims.", "sinks  slowly.", "waits [substeps] here."],
    "label": "2",
}
PIQA = {"goal": "Boil water", "sol1": "Heat it", "sol2": "Cool it", "label": 1}
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
QUERY = {"query": "Sitting: A man", "choices": ["stands", "sits"], "gold": 1}
HEAT = ("Question: Boil water\nAnswer:", ("Heat it", "Cool it"), 1)
HOT = "Question: What is hot?\nAnswer:"
HELLASWAG, PLAIN, LAMBADA = ("hellaswag",), ("multiple_choice",), ("lambada",)
ARCS = ("arc_easy", "arc_challenge", "multiple_choice")
ALL = ("hellaswag", "lambada", "multiple_choice")  # harnesses dump all benchmarks in one form


@pytest.mark.parametrize(
    ("forms", "row", "wanted"),
    [
        (
            HELLASWAG,
            SAILING,
            (
                "Sailing: A boat. How. it floats The crew",
                (" swims.", "sinks slowly.", "waits here."),
                2,
            ),
        ),
        (  # without its halves
            HELLASWAG,
            CHOICE | {"activity_label": "Sitting", "ctx": "A man sits. he"},
            ("Sitting: A man sits. he", ("He stands.", "He flies."), 0),
        ),
        (("piqa", "multiple_choice"), PIQA, HEAT),
        (LAMBADA, {"text": "He said  to her"}, ("He said  to", ("her",), 0)),
        (PLAIN, CHOICE | {"ctx": "[x]  a "}, ("[x]  a ", ("He stands.", "He flies."), 0)),
        (ALL, QUERY, ("Sitting: A man", ("stands", "sits"), 1)),
        (ALL, {"context": "He said to", "continuation": " her"}, ("He said to", ("her",), 0)),
        (ALL, {"context": "He said to ", "continuation": "her"}, ("He said to", ("her",), 0)),
        (ALL, {"context": "He said to", "continuation": "her"}, ("He said to", ("her",), 0)),
        (ARCS, ARC, (HOT, ("Ice", "Fire", "Snow"), 1)),
        (ARCS, ARC_OF_AI2, (HOT, ("Ice", "Fire"), 1)),
    ],
)
def test_items_of_every_form_are_read(tmp_path, forms, row, wanted):
    for form in forms:
        (question,) = read(tmp_path, form, row)
        assert (question.context, question.endings, question.answer) == wanted


def test_lines_beyond_the_limit_are_not_read(tmp_path):
    questions = read(tmp_path, "multiple_choice", CHOICE, b"", CHOICE, b"{broken", limit=2)
    assert [question.place for question in questions] == [
        f"{tmp_path}/items.jsonl:1",
        f"{tmp_path}/items.jsonl:3",
    ]


TWO = CHOICE | {"endings": ["a", ""]}
PLAIN_MISTAKES: list[tuple[Any, str]] = [
    (b'{"ctx": "a"', r"items\.jsonl:2: it is no JSON object \(Expecting.*Every line is one item"),
    (b'{"ctx": "\xff"}', "its byte 9 is not UTF-8"),
    ([1], "it is no JSON object"),
    (CHOICE | {"ctx": 3}, "it has no text `ctx`"),
    ({"ctx": "a", "label": 0}, "it has no list of texts `endings`"),
    (CHOICE | {"endings": ["one"]}, "it has 1 endings; expected at least 2"),
    (TWO, "one of its endings is empty"),
    (CHOICE | {"label": 2}, "its label is 2; expected a number from 0 to 1"),
    (CHOICE | {"label": ""}, "its label is ''"),
    (CHOICE | {"label": True}, "its label is True"),
]
OTHER_MISTAKES: list[tuple[str, Any, str]] = [
    *(("lambada", {"text": text}, "no last word") for text in ("word", "two words ", " word")),
    ("piqa", b"  ", "has no items"),
    ("multiple_choice", QUERY | {"gold": 2}, "its gold is 2; expected a number from 0 to"),
    ("lambada", {"context": "a", "continuation": " "}, "its continuation is empty"),
    (
        "arc_easy",
        ARC | {"answerKey": "D"},
        r"answerKey is 'D'; expected one of its labels \['1', '2', '3",
    ),
    ("arc_easy", ARC | {"choices": "Fire"}, "its `choices` are no texts with labels"),
    ("arc_easy", ARC | {"choices": {"text": ["Ice", 2], "label": ["1", "2"]}}, "no list of texts"),
    ("arc_easy", ARC | {"choices": {"text": ["a", "b"], "label": ["2"]}}, "its answerKey is '2'"),
    ("arc_easy", ARC | {"question": 3}, "it has no text `stem`"),
]


@pytest.mark.parametrize(
    ("form", "rows", "message"),
    [
        *(("multiple_choice", (CHOICE, row), message) for row, message in PLAIN_MISTAKES),
        *((form, (row,), message) for form, row, message in OTHER_MISTAKES),
        # The first item decides the form of a file.
        ("multiple_choice", (QUERY, CHOICE), ":2: it has no list of texts `choices`.*: query, "),
    ],
)
def test_a_broken_line_is_reported_with_the_reason(tmp_path, form, rows, message):
    with pytest.raises(EvaluationError, match=message):
        read(tmp_path, form, *rows)


def names(tasks):
    return [(task.name, task.form, task.file.name) for task in tasks]


def test_tasks_are_found_by_name_by_file_and_in_a_folder(tmp_path):
    files = ("hellaswag_val.jsonl", "lambada/test.jsonl", "wiki.txt", "more/play.txt")
    for name in (*files, "eval_bundle/core.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_tasks(["hellaswag", "lambada", "perplexity"], data=tmp_path)
    assert names(found) == [
        ("hellaswag", "hellaswag", "hellaswag_val.jsonl"),
        ("lambada", "lambada", "test.jsonl"),
        ("play", "perplexity", "play.txt"),
        ("wiki", "perplexity", "wiki.txt"),
    ]
    bundle = [("core", "core", "core.yaml")]
    assert names(find_tasks([f"core={tmp_path}/eval_bundle"], data=None)) == bundle
    assert names(find_tasks(["core"], data=tmp_path)) == bundle
    assert names(find_tasks(["core"], data=tmp_path / "eval_bundle")) == bundle
    file = tmp_path / "hellaswag_val.jsonl"
    assert names(find_tasks([f"piqa={file}", str(file)], data=None)) == [
        ("piqa", "piqa", "hellaswag_val.jsonl"),
        ("hellaswag_val", "multiple_choice", "hellaswag_val.jsonl"),
    ]


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (["helaswag"], "task 'helaswag' is unknown; known are hellaswag, piqa, arc_easy"),
        (["arc=x.jsonl"], "task 'arc' is unknown"),
        (["piqa=none.jsonl"], r"none\.jsonl: there is no such file"),
        (["none.txt"], r"none\.txt: there is no such file"),
        (["core=none"], r"none/core\.yaml: there is no such file"),
        (["core"], r"holds no core\.yaml and no \*/core\.yaml. Name it: core=PATH"),
        (["piqa"], r"holds no piqa\*\.jsonl and no piqa/\*\.jsonl"),
        (["lambada"], r"which of .*lambada_a\.jsonl, .*lambada_b\.jsonl is meant"),
        (["a.txt", "a.txt"], "a is there twice"),
    ],
)
def test_a_missing_task_is_rejected(tmp_path, monkeypatch, requests, message):
    monkeypatch.chdir(tmp_path)
    for name in ("lambada_a.jsonl", "lambada_b.jsonl", "a.txt"):
        Path(name).touch()
    with pytest.raises(ConfigError, match=message):
        find_tasks(requests, data=tmp_path)
    with pytest.raises(ConfigError, match="task piqa: name its file, piqa=FILE"):
        find_tasks(["piqa"], data=None)
    with pytest.raises(ConfigError, match="task core: name its folder, core=FOLDER"):
        find_tasks(["core"], data=None)
