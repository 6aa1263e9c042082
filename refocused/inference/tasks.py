"""Task files: JSON lines of HellaSwag's, PIQA's and LAMBADA's forms as questions to a model."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from refocused.errors import ConfigError, EvaluationError

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
            or a FILE: `.jsonl` in HellaSwag's form, taken as it stands, or `.txt`.
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

    Raises:
        EvaluationError: The file cannot be read, or one of the lines read is broken.
    """
    read = FORMS[task.form]
    questions: list[Question] = []
    for number, line in enumerate(_lines(task.file), start=1):
        if not line.strip():
            continue
        if len(questions) == limit:
            break
        place = f"{task.file}:{number}"
        try:
            questions.append(dataclasses.replace(read(_record(line)), place=place))
        except _BrokenItem as error:
            raise EvaluationError(
                f"{place}: {error} Every line is one item of the {task.form} form: "
                f"{FIELDS[task.form]}."
            ) from None
    if not questions:
        raise EvaluationError(f"{task.file} has no items. Name a file of JSON lines.")
    return questions


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
                f"task {name!r} is unknown; known are {', '.join(known)}, and files: .jsonl of "
                "items with ctx, endings and label, or .txt for perplexity."
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
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _BrokenItem(f"byte {error.start + 1} of it is no UTF-8.") from None
    except ValueError as error:
        raise _BrokenItem(f"it is no JSON ({error}).") from None
    if not isinstance(record, dict):
        raise _BrokenItem("it is no JSON object.")
    return record


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
    endings = tuple(_without_markup(ending) for ending in _endings(record))
    return _choice(_without_markup(context), endings, record)


def _piqa(record: Mapping[str, Any]) -> Question:
    context = f"Question: {_text(record, 'goal')}\nAnswer:"
    return _choice(context, (_text(record, "sol1"), _text(record, "sol2")), record)


def _lambada(record: Mapping[str, Any]) -> Question:
    context, space, last = _text(record, "text").rpartition(" ")
    if not (space and context.strip() and last.strip()):
        raise _BrokenItem("its text has no last word that follows others after a space.")
    return Question(context, (last,), 0)


def _plain(record: Mapping[str, Any]) -> Question:
    return _choice(_text(record, "ctx"), tuple(_endings(record)), record)


def _choice(context: str, endings: tuple[str, ...], record: Mapping[str, Any]) -> Question:
    if any(not ending for ending in endings):
        raise _BrokenItem("one of its endings is empty.")
    return Question(context, endings, _label(record, choices=len(endings)))


def _without_markup(text: str) -> str:
    """Leave out what WikiHow's pages left in HellaSwag's texts."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _endings(record: Mapping[str, Any]) -> list[str]:
    endings = record.get("endings")
    if not isinstance(endings, list) or not all(isinstance(ending, str) for ending in endings):
        raise _BrokenItem("it has no list of texts `endings`.")
    if len(endings) < 2:
        raise _BrokenItem(f"it has {len(endings)} endings, and at least 2 are wanted.")
    return endings


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise _BrokenItem(f"it has no text `{name}`.")
    return value


def _label(record: Mapping[str, Any], *, choices: int) -> int:
    label = record.get("label")
    if isinstance(label, str) and label.isdecimal():
        label = int(label)
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < choices:
        raise _BrokenItem(
            f"its label is {label!r}, and a number from 0 to {choices - 1} is wanted."
        )
    return label


PLAIN = "multiple_choice"
FORMS: Mapping[str, Callable[[Mapping[str, Any]], Question]] = {
    "hellaswag": _hellaswag,
    "piqa": _piqa,
    "lambada": _lambada,
    PLAIN: _plain,
}
FIELDS = {
    "hellaswag": "ctx (or ctx_a and ctx_b), endings, label, and perhaps activity_label",
    "piqa": "goal, sol1, sol2, label",
    "lambada": "text",
    PLAIN: "ctx, endings, label",
}
