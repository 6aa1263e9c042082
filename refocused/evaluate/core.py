"""CORE, the mean score of DCLM's 22 tasks with examples in the prompt, from their published bundle.

Prompts, draws of examples and items, and what is scored are those of nanochat's `core_eval.py` and
`base_eval.py` (July 2026), so that scores can be compared with its table. DCLM: Li et al. 2024,
arXiv 2406.11794.
"""

import csv
import dataclasses
import functools
import itertools
import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from refocused.config.yaml_source import parse_yaml
from refocused.evaluate.continuations import Continuation, Encoder, Scored
from refocused.evaluate.multiple_choice import EncodedTask, Measure, mean_of, prepare
from refocused.evaluate.tasks import CORE, TaskFile, read_questions
from refocused.system.errors import ConfigError, EvaluationError
from refocused.system.strict_json import parse_json_object

TASKS_FILE, CHANCE_FILE, ITEMS_FOLDER = "core.yaml", "eval_meta_data.csv", "eval_data"
ITEM_SEED, EXAMPLE_SEED = 1337, 1234  # nanochat's
PROMPTS_AT_ONCE = 1024  # encoded together
Item = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class CoreTask:
    """A task of the bundle, with its items in the order in which they are scored."""

    label: str
    kind: str  # a key of `FIELDS`
    examples: int  # complete items before each question
    delimiter: str  # between a question and its answer
    chance: float  # accuracy of a guess, 0 to 1
    items: Sequence[Item]

    def prompts(self, number: int) -> list[str]:
        """Return the prompts of an item: one for each choice, or without and with its answer."""
        others, item = self._others(number), self.items[number]
        if self.kind == "multiple_choice":
            shown = [
                f"{one['query']}{self.delimiter}{one['choices'][one['gold']]}" for one in others
            ]
            asked = [f"{item['query']}{self.delimiter}{choice}" for choice in item["choices"]]
        elif self.kind == "schema":
            shown = [
                f"{one['context_options'][one['gold']]}{self.delimiter}{one['continuation']}"
                for one in others
            ]
            rest = f"{self.delimiter}{item['continuation']}"
            asked = [f"{context}{rest}" for context in item["context_options"]]
        else:
            shown = [
                f"{str(one['context']).strip()}{self.delimiter}{one['continuation']}"
                for one in others
            ]
            question = f"{str(item['context']).strip()}{self.delimiter}"
            asked = [question, f"{question}{item['continuation']}"]
        before = "".join(f"{text}\n\n" for text in shown)
        prompts = [before + text for text in asked]
        if self.kind == "language_modeling":
            prompts[0] = prompts[0].strip()  # its last space belongs to the first token after it
        return prompts

    def _others(self, number: int) -> list[Item]:
        draw = random.Random(EXAMPLE_SEED + number)
        drawn = draw.sample(range(len(self.items) - 1), self.examples)
        return [self.items[other + (other >= number)] for other in drawn]


FIELDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


def read_bundle(folder: Path, *, limit: int | None = None) -> list[CoreTask]:
    """Read an unpacked bundle's tasks; `limit` draws the items of nanochat's `max-per-task`.

    Raises:
        EvaluationError: A file is missing or has another format, or a task has too few items.
    """
    try:
        rows = csv.DictReader((folder / CHANCE_FILE).read_text().splitlines())
        chances = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}
        tasks = parse_yaml((folder / TASKS_FILE).read_text())["icl_tasks"]
        read = [_read_task(folder / ITEMS_FOLDER, task, chances, limit) for task in tasks]
    except OSError as error:
        raise EvaluationError(
            f"{error.filename}: {error.strerror}. Name the unpacked bundle, a folder with "
            f"{TASKS_FILE}, {CHANCE_FILE} and {ITEMS_FOLDER}."
        ) from None
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise EvaluationError(
            f"{folder} has another format than DCLM's bundle: {type(error).__name__} {error}."
        ) from None
    if not read:
        raise EvaluationError(f"{folder / TASKS_FILE} names no task.")
    return read


def _read_task(
    folder: Path, task: Mapping[str, Any], chances: Mapping[str, float], limit: int | None
) -> CoreTask:
    label, kind, examples = str(task["label"]), task["icl_task_type"], int(task["num_fewshot"][0])
    file = folder / str(task["dataset_uri"])
    if kind not in FIELDS:
        raise EvaluationError(f"{label}: the task type {kind!r} is unknown: {', '.join(FIELDS)}.")
    if label not in chances:
        raise EvaluationError(f"{folder.parent / CHANCE_FILE} has no random baseline of {label}.")
    items: list[Item] = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                items.append(_checked(parse_json_object(line), FIELDS[kind]))
            except ValueError as error:
                raise EvaluationError(f"{file}:{number}: {error}") from None
    random.Random(ITEM_SEED).shuffle(items)
    items = items[:limit]
    if len(items) <= examples:
        raise EvaluationError(
            f"{label} has {len(items)} items, and its prompts show {examples} others. "
            f"Take at least {examples + 1} (--limit, evaluation.task_items)."
        )
    delimiter = str(task.get("continuation_delimiter", " "))
    return CoreTask(label, kind, examples, delimiter, chances[label], items)


def _checked(item: Item, fields: Sequence[str]) -> Item:
    missing = [name for name in fields if item.get(name) is None]
    if missing:
        raise ValueError(f"the item has no {', '.join(missing)}.")
    if "gold" in fields:
        choices = item[next(name for name in fields if name in ("choices", "context_options"))]
        if not isinstance(choices, list) or len(choices) < 2:
            raise ValueError("the item has no list of at least 2 choices.")
        if type(item["gold"]) is not int or not 0 <= item["gold"] < len(choices):
            raise ValueError(f"gold is {item['gold']!r}; expected 0 to {len(choices) - 1}.")
    return item


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The right choice of an item, None if it must be the greedy one; the tokens of each scored."""

    gold: int | None
    scored: tuple[int, ...]

    def is_right(self, scores: Sequence[Scored]) -> bool:
        """Judge the scores of the item's prompts: the least loss a token is the answer."""
        if self.gold is None:
            return scores[0].is_greedy
        losses = [
            -score.log_probability / count if count else math.nan
            for score, count in zip(scores, self.scored, strict=True)
        ]
        return losses.index(min(losses)) == self.gold


def encode_task(task: TaskFile, encoder: Encoder, *, limit: int | None = None) -> EncodedTask:
    """Encode a task of any form but `perplexity` for one model; of CORE, all of its tasks.

    Raises:
        EvaluationError: As `read_questions`, `prepare`, `read_bundle` and `prepare_tasks`.
    """
    if task.form != CORE:
        return prepare(task.name, read_questions(task, limit=limit), encoder)
    tasks = read_bundle(task.file, limit=limit)
    answered, continuations, skipped = prepare_tasks(task.name, tasks, encoder)
    items = sum(len(answers) for _, answers in answered)
    measure = functools.partial(measures_of, answered)
    return EncodedTask(task.name, items, continuations, measure, skipped=skipped)


def prepare_tasks(
    name: str, tasks: Sequence[CoreTask], encoder: Encoder
) -> tuple[list[tuple[CoreTask, list[Answer]]], list[Continuation], int]:
    """Encode tasks; return what is right of each, all that is scored, and how many items cannot be.

    Prompts begin with the end-of-text token and lose their beginning where they exceed the model's
    context. Scored are: of a multiple choice, what follows the prompts' common beginning; of a
    schema, their common end; of a language modeling task, the answer.

    Raises:
        EvaluationError: The tokenizer has no token that begins a document.
    """
    first = encoder.end_of_text_id
    if first is None:
        raise EvaluationError(
            f"{name}: the tokenizer has no end-of-text token, with which every prompt begins."
        )
    continuations: list[Continuation] = []
    answered: list[tuple[CoreTask, list[Answer]]] = []
    skipped = 0
    for task in tasks:
        answers: list[Answer] = []
        for number, prompts in _encoded(task, encoder, first):
            scored = SCORED[task.kind](prompts)
            kept = [ids[-encoder.context_tokens :] for ids in prompts]
            if any(count >= len(ids) for count, ids in zip(scored, kept, strict=True)):
                skipped += 1
                continue
            asked = slice(1, None) if task.kind == "language_modeling" else slice(None)
            for whole, ids, count in zip(prompts[asked], kept[asked], scored[asked], strict=True):
                is_cut = len(ids) < len(whole)
                continuations.append(Continuation(array("i", ids), count, is_cut=is_cut))
            gold = task.items[number].get("gold") if asked.start is None else None
            answers.append(Answer(gold, tuple(scored[asked])))
        answered.append((task, answers))
    return answered, continuations, skipped


def outcomes(answers: Sequence[Answer], scores: Iterator[Scored]) -> list[bool]:
    """Return which items are right; takes their scores from the iterator."""
    return [
        answer.is_right(list(itertools.islice(scores, len(answer.scored)))) for answer in answers
    ]


def measures_of(
    tasks: Sequence[tuple[CoreTask, Sequence[Answer]]], scored: Sequence[Scored]
) -> dict[str, Measure]:
    """Return each task's accuracy, and `core`: the mean of (accuracy - chance) / (1 - chance)."""
    scores, accuracies = iter(scored), dict[str, Measure]()
    centred: list[float] = []
    errors: list[float | None] = []
    for task, answers in tasks:
        right = outcomes(answers, scores)
        accuracy = (
            mean_of([float(value) for value in right]) if right else Measure(task.chance, None)
        )
        accuracies[task.label] = accuracy
        centred.append((accuracy.value - task.chance) / (1 - task.chance))
        error = accuracy.standard_error
        errors.append(None if error is None else error / (1 - task.chance))
    known = [error for error in errors if error is not None]
    error = math.hypot(*known) / len(errors) if len(known) == len(errors) else None
    return {CORE: Measure(sum(centred) / len(centred), error), **accuracies}


def _encoded(task: CoreTask, encoder: Encoder, first: int) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield each item's number and the token ids of its prompts."""
    for begin in range(0, len(task.items), PROMPTS_AT_ONCE):
        numbers = range(begin, min(begin + PROMPTS_AT_ONCE, len(task.items)))
        prompts = [task.prompts(number) for number in numbers]
        texts = [text for some in prompts for text in some]
        ids = (one if one[:1] == [first] else [first, *one] for one in encoder.encode(texts))
        for number, some in zip(numbers, prompts, strict=True):
            yield number, list(itertools.islice(ids, len(some)))


def _common(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens all prompts share."""
    together = zip(*prompts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, together))


def _differing(prompts: Sequence[Sequence[int]]) -> list[int]:
    return [len(ids) - _common(prompts) for ids in prompts]


def _shared_end(prompts: Sequence[Sequence[int]]) -> list[int]:
    return [_common([ids[::-1] for ids in prompts])] * len(prompts)


def _added(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return how many tokens the answer adds; too many if it changes those before it."""
    question, whole = prompts
    is_prefix = whole[: len(question)] == question and len(whole) > len(question)
    return [0, len(whole) - len(question) if is_prefix else len(whole)]


SCORED: Mapping[str, Callable[[Sequence[Sequence[int]]], list[int]]] = {
    "multiple_choice": _differing,
    "schema": _shared_end,
    "language_modeling": _added,
}
