"""Task files: JSON lines in the forms of published benchmarks, as questions to a model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from refocused.system.errors import ConfigError, EvaluationError
from refocused.system.strict_json import MalformedError, parse_json_object

PERPLEXITY = "perplexity"


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A context and the endings that a model chooses from.

    Attributes:
        context: What precedes; empty: nothing.
        endings: Each follows the context after a space. One alone has to be what the model would
            write by itself.
        answer: Place of the right one.
        place: `file:line`.
    """

    context: str
    endings: tuple[str, ...]
    answer: int
    place: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class TaskFile:
    """A task, and where its items are.

    Attributes:
        name: As results are called.
        form: A key of `FORMS`, or `perplexity`.
        file: JSON lines, or a text for perplexity.
    """

    name: str
    form: str
    file: Path


def find_tasks(requests: Sequence[str], *, data: Path | None) -> list[TaskFile]:
    """Find the files of tasks.

    Args:
        requests: Each is a NAME of `FORMS` or `perplexity`, whose files are in `data`; NAME=FILE;
            or a FILE: `.jsonl`, of a form told by its fields, or `.txt`.
        data: A folder that holds `NAME*.jsonl`, perhaps in a folder NAME, and texts as `*.txt`.

    Raises:
        ConfigError: A name is unknown, a file is not there, or two tasks have the same name.
    """
    found = [task for request in requests for task in _find(request, data)]
    names = [task.name for task in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"tasks: {twice} is there twice. Name each once, or give files.")
    return found


def read_questions(task: TaskFile, *, limit: int | None = None) -> list[Question]:
    """Read a task's items, the first ones alone where there is a limit.

    The fields of the first item tell its form where they are those of `TOLD_BY_FIELDS`, else the
    task's name does.

    Raises:
        EvaluationError: The file cannot be read, or one of the lines read is broken.
    """
    read: Reader | None = None
    questions: list[Question] = []
    for number, line in enumerate(_lines(task.file), start=1):
        if not line.strip():
            continue
        if len(questions) == limit:
            break
        place = f"{task.file}:{number}"
        try:
            record = _record(line)
            read = read or _reader(task.form, record)
            questions.append(dataclasses.replace(read(record), place=place))
        except _BrokenItem as error:
            fields = FIELDS[read or FORMS[task.form]]
            raise EvaluationError(f"{place}: {error} Every line is one item: {fields}.") from None
    if not questions:
        raise EvaluationError(f"{task.file} has no items. Name a file of JSON lines.")
    return questions


Reader = Callable[[Mapping[str, Any]], Question]


def _reader(form: str, first: Mapping[str, Any]) -> Reader:
    """Return what reads a file whose first item this is."""
    told = (read for fields, read in TOLD_BY_FIELDS.items() if first.keys() >= set(fields))
    return next(told, FORMS[form])


class _BrokenItem(Exception):  # noqa: N818 - becomes an EvaluationError with its place
    """What is wrong with a line, as a sentence."""


def _find(request: str, data: Path | None) -> list[TaskFile]:
    name, equals, given = request.partition("=")
    known = (*FORMS, PERPLEXITY)
    if equals:
        if name not in known:
            raise ConfigError(f"task {name!r} is unknown; known are {', '.join(known)}.")
        return [TaskFile(name, name, _existing(given))]
    if name not in known:
        form = {".jsonl": PLAIN, ".txt": PERPLEXITY}.get(Path(name).suffix)
        if form is None:
            raise ConfigError(
                f"task {name!r} is unknown; known are {', '.join(known)}, and files: .jsonl, or "
                ".txt for perplexity."
            )
        return [TaskFile(Path(name).stem, form, _existing(name))]
    if data is None:
        raise ConfigError(f"task {name}: name its file, {name}=FILE, or its folder, --data DIR.")
    return _in_folder(name, data.expanduser())


def _in_folder(name: str, data: Path) -> list[TaskFile]:
    patterns = ("*.txt", "*/*.txt") if name == PERPLEXITY else (f"{name}*.jsonl", f"{name}/*.jsonl")
    files = sorted(file for pattern in patterns for file in data.glob(pattern))
    if not files:
        raise ConfigError(
            f"task {name}: {data} holds no {' and no '.join(patterns)}. Name the file: {name}=FILE."
        )
    if name == PERPLEXITY:
        return [TaskFile(file.stem, PERPLEXITY, file) for file in files]
    if len(files) > 1:
        there = ", ".join(str(file) for file in files)
        raise ConfigError(f"task {name}: which of {there} is meant? Name it: {name}=FILE.")
    return [TaskFile(name, name, files[0])]


def _existing(name: str) -> Path:
    file = Path(name).expanduser()
    if not file.is_file():
        raise ConfigError(f"{file}: there is no such file.")
    return file


def _lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().split(b"\n")
    except OSError as error:
        raise EvaluationError(f"{file}: {error.strerror}.") from None


def _record(line: bytes) -> Mapping[str, Any]:
    try:
        return parse_json_object(line)
    except MalformedError as error:
        raise _BrokenItem(f"it is no JSON object ({error}).") from None


def _hellaswag(record: Mapping[str, Any]) -> Question:
    """Read an item as lm-evaluation-harness does (its `tasks/hellaswag/utils.py`).

    Files that were derived from HellaSwag may have `ctx` alone, without its two halves: it is
    taken as it stands then, where the harness begins the second half with a capital letter.
    """
    if "ctx_a" in record and "ctx_b" in record:
        context = f"{_text(record, 'ctx_a')} {_text(record, 'ctx_b').capitalize()}"
    else:
        context = _text(record, "ctx")
    if "activity_label" in record:
        context = f"{_text(record, 'activity_label')}: {context}"
    endings = tuple(_without_markup(ending) for ending in _texts(record, "endings"))
    answer = _label(record, "label", choices=len(endings))
    return _choice(_without_markup(context), endings, answer)


def _piqa(record: Mapping[str, Any]) -> Question:
    context = f"Question: {_text(record, 'goal')}\nAnswer:"
    endings = (_text(record, "sol1"), _text(record, "sol2"))
    return _choice(context, endings, _label(record, "label", choices=2))


def _arc(record: Mapping[str, Any]) -> Question:
    """Read an item as AI2 published it, or as the hub's table of it has it."""
    asked = record.get("question")
    asked = asked if isinstance(asked, dict) else {**record, "stem": asked}
    context = f"Question: {_text(asked, 'stem')}\nAnswer:"
    choices = asked.get("choices")
    if isinstance(choices, dict):
        texts, labels = choices.get("text"), choices.get("label")
    elif isinstance(choices, list) and all(isinstance(one, dict) for one in choices):
        texts, labels = ([one.get(name) for one in choices] for name in ("text", "label"))
    else:
        raise _BrokenItem("its `choices` are no texts with labels.")
    endings, key = _texts({"choices": texts}, "choices"), record.get("answerKey")
    if not isinstance(labels, list) or len(labels) != len(endings) or key not in labels:
        raise _BrokenItem(f"its answerKey is {key!r}, and one of its labels {labels!r} is wanted.")
    return _choice(context, endings, labels.index(key))


def _continued(record: Mapping[str, Any]) -> Question:
    """Read a text and what follows it, with the space between them in either or in neither."""
    context, rest = _text(record, "context"), _text(record, "continuation")
    if not rest.strip():
        raise _BrokenItem("its continuation is empty.")
    return Question(context.removesuffix(" "), (rest.removeprefix(" "),), 0)


def _queried(record: Mapping[str, Any]) -> Question:
    endings = _texts(record, "choices")
    answer = _label(record, "gold", choices=len(endings))
    return _choice(_text(record, "query").removesuffix(" "), endings, answer)


def _lambada(record: Mapping[str, Any]) -> Question:
    context, space, last = _text(record, "text").rpartition(" ")
    if not (space and context.strip() and last.strip()):
        raise _BrokenItem("its text has no last word that follows others after a space.")
    return Question(context, (last,), 0)


def _plain(record: Mapping[str, Any]) -> Question:
    endings = _texts(record, "endings")
    answer = _label(record, "label", choices=len(endings))
    return _choice(_text(record, "ctx"), endings, answer)


def _choice(context: str, endings: tuple[str, ...], answer: int) -> Question:
    if any(not ending for ending in endings):
        raise _BrokenItem("one of its endings is empty.")
    return Question(context, endings, answer)


def _without_markup(text: str) -> str:
    """Leave out what WikiHow's pages left in HellaSwag's texts."""
    text = text.strip().replace(" [title]", ". ")
    # As r"\[.*?\]" of the harness, but in linear time where no bracket is closed.
    kept = re.sub(r"\[[^\]\n]*(\])?", lambda found: "" if found[1] else found[0], text)
    return kept.replace("  ", " ")


def _texts(record: Mapping[str, Any], name: str) -> tuple[str, ...]:
    texts = record.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _BrokenItem(f"it has no list of texts `{name}`.")
    if len(texts) < 2:
        raise _BrokenItem(f"it has {len(texts)} {name}, and at least 2 are wanted.")
    return tuple(texts)


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise _BrokenItem(f"it has no text `{name}`.")
    return value


def _label(record: Mapping[str, Any], name: str, *, choices: int) -> int:
    label = record.get(name)
    if isinstance(label, str) and label.isdecimal():
        label = int(label)
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < choices:
        raise _BrokenItem(
            f"its {name} is {label!r}, and a number from 0 to {choices - 1} is wanted."
        )
    return label


PLAIN = "multiple_choice"
FORMS: Mapping[str, Reader] = {
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "lambada": _lambada,
    PLAIN: _plain,
}
# Forms of published files and of other harnesses' dumps, whatever the task is called.
TOLD_BY_FIELDS: Mapping[tuple[str, ...], Reader] = {
    ("context", "continuation"): _continued,
    ("query", "choices", "gold"): _queried,
    ("question", "answerKey"): _arc,
    ("goal", "sol1", "sol2"): _piqa,
}
FIELDS: Mapping[Reader, str] = {
    _hellaswag: "ctx (or ctx_a and ctx_b), endings, label, and perhaps activity_label",
    _piqa: "goal, sol1, sol2, label",
    _arc: "question, choices with text and label, answerKey",
    _lambada: "text, or context and continuation",
    _plain: "ctx, endings, label; or query, choices, gold; or context, continuation",
    _continued: "context, continuation",
    _queried: "query, choices, gold",
}
