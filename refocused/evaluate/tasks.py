"""Read task files: questions as JSON lines in the formats of published benchmarks."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from refocused.system.errors import ConfigError, EvaluationError, local_path
from refocused.system.strict_json import MalformedError, parse_json_object

PERPLEXITY = "perplexity"
CORE, CORE_FILE = "core", "core.yaml"  # the bundle of DCLM's tasks, see `core.py`
CORE_MEAN = "CORE"  # their mean, among the measures of each task


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A context and the endings a model chooses from; a single ending must be its greedy choice."""

    context: str
    endings: tuple[str, ...]  # each follows the context after a space
    answer: int  # index of the right ending
    place: str = ""  # file:line


@dataclasses.dataclass(frozen=True, slots=True)
class TaskFile:
    """A task's name, its form (a key of `FORMS`, `perplexity` or `core`) and its file."""

    name: str
    form: str
    file: Path


def find_tasks(requests: Sequence[str], *, data: Path | None) -> list[TaskFile]:
    """Find the files of tasks.

    Args:
        requests: Each is a key of `FORMS`, `perplexity` or `core`, with its files in `data`;
            NAME=FILE, or core=FOLDER; or a FILE: `.jsonl`, whose fields give the form, or `.txt`.
        data: A folder with `NAME*.jsonl`, perhaps in a folder NAME, texts as `*.txt`, and the
            unpacked bundle of `core`.

    Raises:
        ConfigError: A name is unknown, a file is missing, or two tasks have the same name.
    """
    tasks: list[TaskFile] = []
    known = (*FORMS, PERPLEXITY, CORE)
    for request in requests:
        name, equals, given = request.partition("=")
        form = {".jsonl": PLAIN, ".txt": PERPLEXITY}.get(Path(name).suffix)
        what = "FOLDER" if name == CORE else "FILE"
        if name in known and equals:
            file = f"{given}/{CORE_FILE}" if name == CORE else given
            tasks.append(TaskFile(name, name, _existing(file)))
        elif name in known and data is not None:
            tasks += _in_folder(name, data)
        elif name in known:
            raise ConfigError(
                f"task {name}: name its {what.lower()}, {name}={what}, or its folder, --data DIR."
            )
        elif equals or form is None:
            files = "" if equals else ", and files: .jsonl, or .txt for perplexity"
            raise ConfigError(f"task {name!r} is unknown; known are {', '.join(known)}{files}.")
        else:
            tasks.append(TaskFile(Path(name).stem, form, _existing(name)))
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"tasks: {twice} is there twice. Name each once, or give files.")
    return tasks


def _in_folder(name: str, data: Path) -> list[TaskFile]:
    usual = f"{name}*.jsonl", f"{name}/*.jsonl"
    special = {PERPLEXITY: ("*.txt", "*/*.txt"), CORE: (CORE_FILE, f"*/{CORE_FILE}")}
    patterns = special.get(name, usual)
    files = sorted(file for pattern in patterns for file in data.glob(pattern))
    if not files:
        raise ConfigError(
            f"task {name}: {data} holds no {' and no '.join(patterns)}. Name it: {name}=PATH."
        )
    if name == PERPLEXITY:
        return [TaskFile(file.stem, PERPLEXITY, file) for file in files]
    if len(files) > 1:
        there = ", ".join(map(str, files))
        raise ConfigError(f"task {name}: which of {there} is meant? Name it: {name}=PATH.")
    return [TaskFile(name, name, files[0])]


def _existing(name: str) -> Path:
    file = local_path(name)
    if not file.is_file():
        raise ConfigError(f"{file}: there is no such file.")
    return file


def read_questions(task: TaskFile, *, limit: int | None = None) -> list[Question]:
    """Read a task's items, at most the first `limit`.

    `READERS_BY_FIELDS` gives the form by the first item's fields, else the task's own form counts.

    Raises:
        EvaluationError: The file cannot be read, or one of the lines read is invalid.
    """
    try:
        lines = task.file.read_bytes().split(b"\n")
    except OSError as error:
        raise EvaluationError(f"{task.file}: {error.strerror}.") from None
    read: Reader | None = None
    questions: list[Question] = []
    for number, line in enumerate(lines, start=1):
        if len(questions) == limit:
            break
        if not line.strip():
            continue
        place = f"{task.file}:{number}"
        try:
            item = parse_json_object(line)
            if read is None:
                fits = (by for keys, by in READERS_BY_FIELDS.items() if item.keys() >= set(keys))
                read = next(fits, FORMS[task.form])
            questions.append(dataclasses.replace(read(item), place=place))
        except ValueError as error:
            is_json = not isinstance(error, MalformedError)
            problem = error if is_json else f"it is no JSON object ({error})."
            fields = _FIELDS[read or FORMS[task.form]]
            raise EvaluationError(f"{place}: {problem} Every line is one item: {fields}.") from None
    if not questions:
        raise EvaluationError(f"{task.file} has no items. Name a file of JSON lines.")
    return questions


Item = Mapping[str, Any]
Reader = Callable[[Item], Question]  # raises ValueError with a sentence on what is wrong


def _hellaswag(item: Item) -> Question:
    """Read an item as lm-evaluation-harness does (its `tasks/hellaswag/utils.py`).

    Files derived from HellaSwag may have `ctx` alone, without its two halves. It is taken as it
    is; the harness would capitalize the second half.
    """
    if "ctx_a" in item and "ctx_b" in item:
        context = f"{text_of(item, 'ctx_a')} {text_of(item, 'ctx_b').capitalize()}"
    else:
        context = text_of(item, "ctx")
    if "activity_label" in item:
        context = f"{text_of(item, 'activity_label')}: {context}"
    endings = tuple(_without_markup(ending) for ending in texts_of(item, "endings"))
    return _choice(_without_markup(context), endings, label_of(item, "label", choices=len(endings)))


def _without_markup(text: str) -> str:
    """Remove what WikiHow's pages left in HellaSwag's texts."""
    text = text.strip().replace(" [title]", ". ")
    # The harness has r"\[.*?\]"; this one takes linear time where no bracket is closed.
    kept = re.sub(r"\[[^\]\n]*(\])?", lambda found: "" if found[1] else found[0], text)
    return kept.replace("  ", " ")


def _piqa(item: Item) -> Question:
    context = f"Question: {text_of(item, 'goal')}\nAnswer:"
    endings = (text_of(item, "sol1"), text_of(item, "sol2"))
    return _choice(context, endings, label_of(item, "label", choices=2))


def _arc(item: Item) -> Question:
    """Read an item as AI2 published it, or as the table on the hub has it."""
    question = item.get("question")
    question = question if isinstance(question, dict) else {**item, "stem": question}
    context = f"Question: {text_of(question, 'stem')}\nAnswer:"
    choices = question.get("choices")
    if isinstance(choices, dict):
        texts, labels = choices.get("text"), choices.get("label")
    elif isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        texts, labels = ([choice.get(name) for choice in choices] for name in ("text", "label"))
    else:
        raise ValueError("its `choices` are no texts with labels.")
    endings, key = texts_of({"choices": texts}, "choices"), item.get("answerKey")
    if not isinstance(labels, list) or len(labels) != len(endings) or key not in labels:
        raise ValueError(f"its answerKey is {key!r}; expected one of its labels {labels!r}.")
    return _choice(context, endings, labels.index(key))


def _continued(item: Item) -> Question:
    context, rest = text_of(item, "context"), text_of(item, "continuation")
    if not rest.strip():
        raise ValueError("its continuation is empty.")
    return Question(context.removesuffix(" "), (rest.removeprefix(" "),), 0)


def _queried(item: Item) -> Question:
    endings = texts_of(item, "choices")
    answer = label_of(item, "gold", choices=len(endings))
    return _choice(text_of(item, "query").removesuffix(" "), endings, answer)


def _lambada(item: Item) -> Question:
    context, space, last = text_of(item, "text").rpartition(" ")
    if not (space and context.strip() and last.strip()):
        raise ValueError("its text has no last word that follows others after a space.")
    return Question(context, (last,), 0)


def _plain(item: Item) -> Question:
    endings = texts_of(item, "endings")
    return _choice(text_of(item, "ctx"), endings, label_of(item, "label", choices=len(endings)))


def _choice(context: str, endings: tuple[str, ...], answer: int) -> Question:
    if not all(endings):
        raise ValueError("one of its endings is empty.")
    return Question(context, endings, answer)


def texts_of(item: Item, name: str) -> tuple[str, ...]:
    """Return a list of at least two texts; raise ValueError with what is wrong, as all readers."""
    texts = item.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"it has no list of texts `{name}`.")
    if len(texts) < 2:
        raise ValueError(f"it has {len(texts)} {name}; expected at least 2.")
    return tuple(texts)


def text_of(item: Item, name: str) -> str:
    """Return a text."""
    value = item.get(name)
    if not isinstance(value, str):
        raise ValueError(f"it has no text `{name}`.")
    return value


def label_of(item: Item, name: str, *, choices: int) -> int:
    """Return the number of the right choice, also from a text of digits."""
    label = item.get(name)
    if isinstance(label, str) and label.isdecimal():
        label = int(label)
    if type(label) is not int or not 0 <= label < choices:
        raise ValueError(f"its {name} is {label!r}; expected a number from 0 to {choices - 1}.")
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
# Published files and other harnesses' dumps, whatever the task is called.
READERS_BY_FIELDS: Mapping[tuple[str, ...], Reader] = {
    ("context", "continuation"): _continued,
    ("query", "choices", "gold"): _queried,
    ("question", "answerKey"): _arc,
    ("goal", "sol1", "sol2"): _piqa,
}
_FIELDS: Mapping[Reader, str] = {
    _hellaswag: "ctx (or ctx_a and ctx_b), endings, label, and perhaps activity_label",
    _piqa: "goal, sol1, sol2, label",
    _arc: "question, choices with text and label, answerKey",
    _lambada: "text, or context and continuation",
    _plain: "ctx, endings, label; or query, choices, gold; or context, continuation",
    _continued: "context, continuation",
    _queried: "query, choices, gold",
}
