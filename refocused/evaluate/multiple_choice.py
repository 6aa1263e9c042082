"""Score multiple choice and last words, with standard errors."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from refocused.evaluate.continuations import Continuation, Encoder, Scored
from refocused.evaluate.tasks import Question

LARGEST_EXPONENT = 700.0


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """A mean over items, or a function of one, with its standard error; None: unknown."""

    value: float
    standard_error: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class TaskResult:
    """A model's scores on a task, under the names of lm-evaluation-harness; none without items."""

    task: str
    items: int  # questions, or sequences of a text
    cut: int  # endings whose context was too long for the model and lost its beginning
    measures: Mapping[str, Measure]
    skipped: int = 0  # questions with an ending that cannot be scored, see `Encoder`
    seconds: float | None = None  # from the first batch to the last; None: not timed

    @property
    def in_line(self) -> Mapping[str, Measure]:
        """The measures of a line: only the first, a mean, of many tasks'."""
        return dict(list(self.measures.items())[: 1 if len(self.measures) > 4 else None])

    @property
    def items_per_second(self) -> float:
        """Questions or sequences."""
        return self.items / self.seconds if self.seconds else 0.0

    def as_record(self) -> dict[str, object]:
        """Return it as JSON values."""
        measures = {name: dataclasses.asdict(measure) for name, measure in self.measures.items()}
        record = {"items": self.items, "cut": self.cut, "skipped": self.skipped, **measures}
        if self.seconds is None:
            return record
        return record | {"seconds": self.seconds, "items_per_second": self.items_per_second}


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedTask:
    """A task, encoded for one model."""

    task: str
    items: int
    continuations: Sequence[Continuation]
    measure: Callable[[Sequence[Scored]], Mapping[str, Measure]]
    skipped: int = 0

    def result(self, scored: Sequence[Scored]) -> TaskResult:
        """Return what the scores of all continuations say; see `score_all`."""
        cut = sum(continuation.is_cut for continuation in self.continuations)
        return TaskResult(self.task, self.items, cut, self.measure(scored), self.skipped)


def prepare(task: str, questions: Sequence[Question], encoder: Encoder) -> EncodedTask:
    """Encode a task's questions, but for those with an ending that cannot be scored.

    Raises:
        EvaluationError: As `Encoder.continuations`.
    """
    pairs = [(item.context, f" {ending}") for item in questions for ending in item.endings]
    owners = [number for number, item in enumerate(questions) for _ in item.endings]
    places = [questions[number].place for number in owners]
    given = encoder.continuations(pairs, places=places)
    skipped = {owner for owner, encoded in zip(owners, given, strict=True) if encoded is None}
    kept = [question for number, question in enumerate(questions) if number not in skipped]
    continuations = [
        encoded
        for owner, encoded in zip(owners, given, strict=True)
        if encoded is not None and owner not in skipped
    ]
    measure = functools.partial(measures_of, kept)
    return EncodedTask(task, len(kept), continuations, measure, skipped=len(skipped))


def measures_of(questions: Sequence[Question], scored: Sequence[Scored]) -> dict[str, Measure]:
    """Judge the log-probabilities of all endings, question by question.

    With several endings, the likeliest is the answer: `acc` by the sum of the log-probabilities,
    `acc_norm` by the sum over the ending's number of characters; the first of several alike. A
    single ending is right, `acc`, when it is the model's greedy choice; its `perplexity` is that
    of the whole ending.
    """
    if not questions:
        return {}
    if all(len(question.endings) == 1 for question in questions):
        loss = mean_of([-score.log_probability for score in scored])
        return {
            "acc": mean_of([float(score.is_greedy) for score in scored]),
            "perplexity": exponential(loss.value, loss.standard_error),
        }
    remaining = iter(scored)
    plain: list[float] = []
    normal: list[float] = []
    for question in questions:
        scores = itertools.islice(remaining, len(question.endings))
        sums = [score.log_probability for score in scores]
        each = [total / len(text) for total, text in zip(sums, question.endings, strict=True)]
        plain.append(float(sums.index(max(sums)) == question.answer))
        normal.append(float(each.index(max(each)) == question.answer))
    return {"acc": mean_of(plain), "acc_norm": mean_of(normal)}


def mean_of(values: Sequence[float]) -> Measure:
    """Return a mean with its standard error, that of a sample: s / sqrt(n) with n - 1 in s."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return Measure(mean, None)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Measure(mean, math.sqrt(variance) / math.sqrt(len(values)))


def exponential(loss: float, error: float | None) -> Measure:
    """Return exp(loss); its error follows by the delta method, d exp(x) = exp(x) dx."""
    value = math.exp(min(loss, LARGEST_EXPONENT))
    return Measure(value, None if error is None else error * value)
