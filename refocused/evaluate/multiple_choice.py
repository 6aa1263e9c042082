"""Tasks with endings to choose from, and last words: scores and their standard errors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from refocused.evaluate.continuations import Continuation, Encoder, Scored, Scorer, score_all
from refocused.evaluate.tasks import Question
from refocused.system.world import World


@dataclasses.dataclass(frozen=True, slots=True)
class Measure:
    """A mean over items.

    Attributes:
        value: The mean, or what follows from it.
        standard_error: How far another choice of as many items would move it; None: unknown.
    """

    value: float
    standard_error: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class TaskResult:
    """How a model did at a task.

    Attributes:
        task: Its name.
        items: Questions, or windows of a text.
        cut: Endings whose context was too long for the model and lost its beginning.
        measures: By the names that lm-evaluation-harness gives them; none without items.
        skipped: Questions left out: an ending is longer than the model's context.
    """

    task: str
    items: int
    cut: int
    measures: Mapping[str, Measure]
    skipped: int = 0

    def as_record(self) -> dict[str, object]:
        """Return it as JSON knows it."""
        measures = {name: dataclasses.asdict(one) for name, one in self.measures.items()}
        return {"items": self.items, "cut": self.cut, "skipped": self.skipped, **measures}


@dataclasses.dataclass(frozen=True, slots=True)
class Examination:
    """A task's questions, encoded for one model.

    Attributes:
        task: Its name.
        questions: All of the same form.
        continuations: Those of all endings, question by question.
        skipped: Questions left out.
    """

    task: str
    questions: Sequence[Question]
    continuations: Sequence[Continuation]
    skipped: int = 0

    def take(
        self,
        scorer: Scorer,
        *,
        rows: int,
        tokens: int | None = None,
        world: World,
        stopping: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> TaskResult | None:
        """Let a model take it, as `score_all` does; None when stopped."""
        scored = score_all(
            self.continuations,
            scorer,
            rows=rows,
            tokens=tokens,
            world=world,
            stopping=stopping,
            progress=progress,
        )
        if scored is None:
            return None
        cut = sum(one.is_cut for one in self.continuations)
        measures = measures_of(self.questions, scored)
        return TaskResult(self.task, len(self.questions), cut, measures, self.skipped)


def prepare(task: str, questions: Sequence[Question], encoder: Encoder) -> Examination:
    """Encode a task's questions, but for those with an ending longer than the model's context.

    Raises:
        EvaluationError: An ending has no token of its own, or a context is empty and the tokenizer
            has no end-of-text token.
    """
    pairs = [(one.context, f" {ending}") for one in questions for ending in one.endings]
    owners = [number for number, one in enumerate(questions) for _ in one.endings]
    places = [questions[number].place for number in owners]
    given = encoder.continuations(pairs, places=places, groups=owners)
    fits = [True] * len(questions)
    for owner, one in zip(owners, given, strict=True):
        fits[owner] = fits[owner] and one is not None
    kept = list(itertools.compress(questions, fits))
    continuations = [one for one in given if one is not None and fits[one.group]]
    return Examination(task, kept, continuations, skipped=len(questions) - len(kept))


def measures_of(questions: Sequence[Question], scored: Sequence[Scored]) -> dict[str, Measure]:
    """Judge the log-probabilities of all endings, question by question.

    With several endings, the likeliest is the answer: `acc` by the sum of the log-probabilities,
    `acc_norm` by the sum over the ending's number of characters; the first of several alike. A
    single ending is right, `acc`, when the model would write it by itself; its `perplexity` is that
    of the whole ending.
    """
    if not questions:
        return {}
    remaining = iter(scored)
    own = [list(itertools.islice(remaining, len(question.endings))) for question in questions]
    if all(len(question.endings) == 1 for question in questions):
        return _of_last_words([one for (one,) in own])
    judged = [_choices(question, given) for question, given in zip(questions, own, strict=True)]
    return {
        "acc": mean_of([float(plain) for plain, _ in judged]),
        "acc_norm": mean_of([float(normal) for _, normal in judged]),
    }


def mean_of(values: Sequence[float]) -> Measure:
    """Return a mean with its standard error, that of a sample: s / sqrt(n) with n - 1 in s."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return Measure(mean, None)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Measure(mean, math.sqrt(variance) / math.sqrt(len(values)))


def _choices(question: Question, scored: Sequence[Scored]) -> tuple[bool, bool]:
    sums = [one.log_probability for one in scored]
    each = [total / len(text) for total, text in zip(sums, question.endings, strict=True)]
    return _first_largest(sums) == question.answer, _first_largest(each) == question.answer


def _first_largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _of_last_words(scored: Sequence[Scored]) -> dict[str, Measure]:
    loss = mean_of([-one.log_probability for one in scored])
    perplexity = math.exp(min(loss.value, 700.0))
    # By the delta method: d exp(x) = exp(x) dx.
    error = None if loss.standard_error is None else perplexity * loss.standard_error
    return {
        "acc": mean_of([float(one.is_greedy) for one in scored]),
        "perplexity": Measure(perplexity, error),
    }
