"""CORE, the mean score of DCLM's 22 tasks with examples in the prompt, from their published bundle.

Prompts, draws of examples and items, and what is scored are those of nanochat's `core_eval.py` and
`base_eval.py` (July 2026), so that scores can be compared with its table. DCLM: Li et al. 2024,
arXiv 2406.11794.
"""

import csv
import functools
import io
import itertools
import math
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from refocused.config.yaml_source import parse_yaml_mapping
from refocused.evaluate.continuations import Continuation, Encoder, Scored
from refocused.evaluate.multiple_choice import EncodedTask, Measure, mean_of, prepare
from refocused.evaluate.tasks import (
    CORE,
    CORE_MEAN,
    TaskFile,
    label_of,
    read_questions,
    text_of,
    texts_of,
)
from refocused.system.errors import EvaluationError
from refocused.system.strict_json import MalformedError, parse_json_object

CHANCE_FILE, ITEMS_FOLDER = "eval_meta_data.csv", "eval_data"
ITEM_SEED, EXAMPLE_SEED = 1337, 1234  # nanochat's
PROMPTS_AT_ONCE = 4096  # encoded together
LANGUAGE_MODELING = "language_modeling"
# The fields of an item: its texts, and the list of which one is right.
FIELDS: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "multiple_choice": (("query",), "choices"),
    "schema": (("continuation",), "context_options"),
    LANGUAGE_MODELING: (("context", "continuation"), None),
}
Item = Mapping[str, Any]
# An item for a model: the right choice, None if the only one must be the greedy one; the choices.
EncodedItem = tuple[int | None, Sequence[Continuation]]
Encoded = dict[str, tuple[float, Sequence[EncodedItem]]]  # tasks: accuracy of a guess, items
UNPACKED = f"Name the unpacked bundle, with core.yaml, {CHANCE_FILE} and {ITEMS_FOLDER}."


class CoreTask:
    """A task of the bundle: writes the prompts of its items."""

    def __init__(
        self,
        label: str,
        kind: str,
        items: Sequence[Item],
        *,
        examples: int = 0,
        delimiter: str = " ",
        chance: float = 0.0,
    ) -> None:
        """Use items in the order in which they are scored.

        Args:
            label: Its name.
            kind: A key of `FIELDS`.
            items: Each has the fields of its kind.
            examples: Complete items before each question.
            delimiter: Between a question and its answer.
            chance: Accuracy of a guess, from 0 to below 1.
        """
        self.label, self.kind, self.items = label, kind, items
        self.examples, self.delimiter, self.chance = examples, delimiter, chance

    def prompts(self, number: int) -> list[str]:
        """Return the prompts of an item, as many as its `texts`."""
        draw = random.Random(EXAMPLE_SEED + number)
        drawn = draw.sample(range(len(self.items) - 1), self.examples)
        others = (self.items[other + (other >= number)] for other in drawn)
        before = "".join(f"{self.texts(other)[other.get('gold', 1)]}\n\n" for other in others)
        prompts = [before + text for text in self.texts(self.items[number])]
        if self.kind == LANGUAGE_MODELING:
            prompts[0] = prompts[0].strip()  # its last space belongs to the first token after it
        return prompts

    def scored_prompts(self) -> Iterator[list[str]]:
        """Yield each item's prompts, of language modeling only the one with its answer."""
        for number in range(len(self.items)):
            prompts = self.prompts(number)
            yield prompts[-1:] if self.kind == LANGUAGE_MODELING else prompts

    def texts(self, item: Item) -> list[str]:
        """Return an item with each choice; of language modeling, without and with its answer."""
        if self.kind == "multiple_choice":
            return [f"{item['query']}{self.delimiter}{choice}" for choice in item["choices"]]
        if self.kind == "schema":
            rest = f"{self.delimiter}{item['continuation']}"
            return [f"{context}{rest}" for context in item["context_options"]]
        question = f"{item['context'].strip()}{self.delimiter}"
        return [question, f"{question}{item['continuation']}"]


def read_bundle(file: Path, *, limit: int | None = None) -> list[CoreTask]:
    """Read the tasks that a bundle's `core.yaml` names.

    Args:
        file: It, with `eval_meta_data.csv` and `eval_data/` beside it.
        limit: Draw so many items of each task, those of nanochat's `max-per-task`; None: all.

    Raises:
        EvaluationError: A file is missing or has another format, or a task has too few items.
    """
    chances, tasks = file.with_name(CHANCE_FILE), dict[str, CoreTask]()
    try:
        entries = parse_yaml_mapping(file.read_bytes()).get("icl_tasks")
        reader = csv.DictReader(io.StringIO(chances.read_bytes().decode("utf-8-sig")))
        rows = {row.get("Eval Task"): (reader.line_num, row) for row in reader}
    except MalformedError as error:
        raise EvaluationError(f"{file}: {error}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise EvaluationError(f"{chances}: {error}.") from None
    except OSError as error:
        raise EvaluationError(f"{error.filename}: {error.strerror}. {UNPACKED}") from None
    if not isinstance(entries, list) or not entries:
        raise EvaluationError(f"{file}: it has no list of tasks, icl_tasks. {UNPACKED}")
    for number, entry in enumerate(entries, start=1):
        try:
            names = ("label", "icl_task_type", "dataset_uri", "num_fewshot")
            label, kind, uri, (examples, *_) = (entry[name] for name in names)
            delimiter = entry.get("continuation_delimiter", " ")
            if {type(text) for text in (label, kind, uri, delimiter)} != {str}:
                raise ValueError
            if type(examples) is not int or examples < 0:
                raise ValueError
        except (LookupError, TypeError, ValueError):
            raise EvaluationError(
                f"{file}: task {number} needs the texts label, icl_task_type and dataset_uri, and "
                "num_fewshot, a list of numbers."
            ) from None
        if label in tasks or kind not in FIELDS:
            is_twice = f"{label} is there twice; keep one"
            is_other = f"{label} is of the type {kind!r}; known are {', '.join(FIELDS)}"
            raise EvaluationError(f"{file}: {is_twice if label in tasks else is_other}.")
        line, row = rows.get(label, (1, {}))
        given = row.get("Random baseline")
        try:
            chance = float(given or "")
        except ValueError:
            chance = math.nan
        if not 0 <= chance < 100:
            raise EvaluationError(
                f"{chances}:{line}: the `Random baseline` of the `Eval Task` {label} is {given!r}; "
                "expected a percentage from 0 to below 100."
            )
        items = read_items(file.parent / ITEMS_FOLDER / uri, kind)
        random.Random(ITEM_SEED).shuffle(items)
        items = items[:limit]
        if len(items) <= examples:
            raise EvaluationError(
                f"{file.parent / ITEMS_FOLDER / uri}: {label} has {len(items)} items, and shows "
                f"{examples} others before each. Take at least {examples + 1} (--limit, "
                "evaluation.task_items)."
            )
        tasks[label] = CoreTask(
            label, kind, items, examples=examples, delimiter=delimiter, chance=chance / 100
        )
    return list(tasks.values())


def read_items(file: Path, kind: str) -> list[Item]:
    """Read a task's items; raise EvaluationError if a line is not one of its kind."""
    texts, choices = FIELDS[kind]
    items: list[Item] = []
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise EvaluationError(f"{file}: {error.strerror}. {UNPACKED}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            given = parse_json_object(line)
            item: dict[str, Any] = {name: text_of(given, name) for name in texts}
            if choices is not None:
                item[choices] = texts_of(given, choices)
                item["gold"] = label_of(given, "gold", choices=len(item[choices]))
        except ValueError as error:
            is_json = not isinstance(error, MalformedError)
            problem = error if is_json else f"it is no JSON object ({error})."
            raise EvaluationError(f"{file}:{number}: {problem}") from None
        items.append(item)
    return items


def encode_task(task: TaskFile, encoder: Encoder, *, limit: int | None = None) -> EncodedTask:
    """Encode a task of any form but `perplexity` for one model; of CORE, all of its tasks.

    Raises:
        EvaluationError: As `read_questions`, `prepare`, `read_bundle` and `encode_items`.
    """
    if task.form != CORE:
        return prepare(task.name, read_questions(task, limit=limit), encoder)
    tasks, encoded, total = read_bundle(task.file, limit=limit), Encoded(), 0
    for each in tasks:
        encoded[each.label] = each.chance, encode_items(each, encoder)
        total += len(each.items)
    items = [item for _, some in encoded.values() for item in some]
    return EncodedTask(
        task.name,
        len(items),
        [choice for _, choices in items for choice in choices],
        functools.partial(measures_of, encoded),
        skipped=total - len(items),
    )


def encode_items(task: CoreTask, encoder: Encoder) -> list[EncodedItem]:
    """Encode a task's items, but for those whose answer does not fit or has no token of its own.

    Prompts begin with the end-of-text token and lose their beginning where they exceed the model's
    context. Scored are: of a multiple choice, what follows the prompts' common beginning; of a
    schema, their common end; of a language modeling task, the answer.

    Raises:
        EvaluationError: The tokenizer has no token that begins a document, or no item is left.
    """
    first, is_text = encoder.end_of_text_id, task.kind == LANGUAGE_MODELING
    if first is None:
        raise EvaluationError(
            f"{task.label}: the tokenizer has no end-of-text token, with which every prompt begins."
        )
    encoded: list[EncodedItem] = []
    texts = itertools.chain.from_iterable(map(task.prompts, range(len(task.items))))
    batches = iter(lambda: list(itertools.islice(texts, PROMPTS_AT_ONCE)), [])
    rows = (ids for batch in batches for ids in encoder.encode(batch))
    for item in task.items:
        prompts = [
            ids if ids[:1] == [first] else [first, *ids]
            for ids in itertools.islice(rows, len(task.texts(item)))
        ]
        ends = [ids[::-1] for ids in prompts] if task.kind == "schema" else prompts
        columns = zip(*ends, strict=False)
        alike = sum(1 for _ in itertools.takewhile(lambda ids: len(set(ids)) == 1, columns))
        if is_text and alike < len(prompts.pop(0)):
            continue  # the answer changes the tokens before it
        choices = []
        for ids in prompts:
            kept = array("i", ids[-encoder.context_tokens :])
            scored = min(alike, len(ids) - 1) if task.kind == "schema" else len(ids) - alike
            choices.append(Continuation(kept, scored, is_cut=len(kept) < len(ids)))
        fit = all(choice.scored < len(choice.ids) for choice in choices)
        if fit and (not is_text or choices[0].scored):
            encoded.append((None if is_text else item["gold"], choices))
    if not encoded:
        raise EvaluationError(
            f"{task.label}: the answers of all {len(task.items)} items have no token of their own, "
            f"or more than the {encoder.context_tokens} of the context."
        )
    return encoded


def outcomes(items: Sequence[EncodedItem], scores: Iterator[Scored]) -> list[bool]:
    """Return which items are right; takes the scores of their choices from the iterator.

    The right choice has the least mean loss of its tokens; the first of several alike. One without
    tokens is taken where it is the first, as nanochat's NaN.
    """
    right = []
    for gold, choices in items:
        some = list(itertools.islice(scores, len(choices)))
        losses = [
            -score.log_probability / choice.scored if choice.scored else math.nan
            for choice, score in zip(choices, some, strict=True)
        ]
        # Equal choices may differ in the last digits, from batches of different shapes.
        losses = [losses[choices.index(choice)] for choice in choices]
        is_right = some[0].is_greedy if gold is None else losses.index(min(losses)) == gold
        right.append(is_right)
    return right


def measures_of(encoded: Encoded, scored: Sequence[Scored]) -> dict[str, Measure]:
    """Return `CORE_MEAN`, of (accuracy - chance) / (1 - chance), and each task's accuracy."""
    scores, accuracies = iter(scored), dict[str, Measure]()
    centred, errors = list[float](), list[float]()
    for label, (chance, items) in encoded.items():
        accuracy = mean_of([float(right) for right in outcomes(items, scores)])
        accuracies[label] = accuracy
        centred.append((accuracy.value - chance) / (1 - chance))
        if accuracy.standard_error is not None:
            errors.append(accuracy.standard_error / (1 - chance))
    error = math.hypot(*errors) / len(centred) if len(errors) == len(centred) else None
    return {CORE_MEAN: Measure(sum(centred) / len(centred), error), **accuracies}
