"""One model, all its tasks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from refocused.evaluate import multiple_choice, perplexity
from refocused.evaluate.continuations import Encoder
from refocused.evaluate.load_model import LoadedModel
from refocused.evaluate.multiple_choice import Examination, TaskResult
from refocused.evaluate.network_scores import NetworkScorer
from refocused.evaluate.perplexity import Passage
from refocused.evaluate.tasks import PERPLEXITY, TaskFile, read_questions
from refocused.system.errors import EvaluationError
from refocused.system.world import World


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How tasks are put to a model.

    Attributes:
        limit: Items of each task, and windows of each text; None: all.
        batch: Endings, or windows, that the model reads at once.
        context_tokens: Tokens that it sees at once; None: as `context_of` says.
        stride: New tokens of each window of a text; None: the whole context.
    """

    limit: int | None = None
    batch: int = 16
    context_tokens: int | None = None
    stride: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TimedResult:
    """A task's result, and the time that the model took for it."""

    result: TaskResult
    seconds: float

    @property
    def items_per_second(self) -> float:
        """Questions or windows."""
        return self.result.items / self.seconds if self.seconds > 0 else 0.0


Progress = Callable[[str, int, int], None]


class Evaluation:
    """A model and what it needs to take tasks.

    Attributes:
        context_tokens: Tokens that the model sees at once.
    """

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        """Prepare a model that has a tokenizer.

        Raises:
            EvaluationError: The context is none that the model takes, or its tokenizer has ids
                that it does not know.
        """
        self._settings = settings
        self._scorer = NetworkScorer(model.network)
        self.context_tokens = context_of(
            settings.context_tokens, model, longest=self._scorer.context_tokens
        )
        self._encoder = Encoder(
            model.tokenizer,
            context_tokens=self.context_tokens,
            vocabulary=self._scorer.vocabulary,
        )

    def run(
        self,
        tasks: Sequence[TaskFile],
        *,
        world: World,
        progress: Progress = lambda task, done, total: None,
    ) -> list[TimedResult]:
        """Take all tasks; every rank must call, and gets all results.

        The time of a task is from its first batch on.

        Raises:
            EvaluationError: On every rank: a file is broken. No task has begun then.
        """
        prepared = world.on_all_ranks(lambda: [self._prepare(task) for task in tasks])
        return [self._take(one, world, progress) for one in prepared]

    def _prepare(self, task: TaskFile) -> Examination | Passage:
        settings = self._settings
        if task.form == PERPLEXITY:
            text = perplexity.read_text(task.file)
            return perplexity.prepare(
                task.name, text, self._encoder, stride=settings.stride, limit=settings.limit
            )
        questions = read_questions(task, limit=settings.limit)
        return multiple_choice.prepare(task.name, questions, self._encoder)

    def _take(self, one: Examination | Passage, world: World, progress: Progress) -> TimedResult:
        began = time.monotonic()
        result = one.take(
            self._scorer,
            rows=self._settings.batch,
            world=world,
            progress=lambda done, total: progress(one.task, done, total),
        )
        assert result is not None  # nothing stops it
        return TimedResult(result, time.monotonic() - began)


def context_of(wanted: int | None, model: LoadedModel, *, longest: int | None) -> int:
    """Return how many tokens a model sees at once.

    Without a wish it is what the model was trained on, beyond which its embeddings of positions
    have learned nothing; of one that does not say, the longest that its configuration names. More
    than that can be wanted of a model that has no limit.

    Args:
        wanted: By the command line.
        model: A step, an export of one, or any other.
        longest: By the model's configuration.

    Raises:
        EvaluationError: More is wanted than the model takes, or it does not say how much that is.
    """
    limit = model.longest_sequence
    if wanted is not None and limit is not None and wanted > limit:
        raise EvaluationError(
            f"--context {wanted}: {model.source} reads at most {limit} tokens at once (its number "
            f"of positions). Take --context {limit} or less."
        )
    found = wanted or model.trained_length or longest
    if found is None:
        raise EvaluationError(
            f"{model.source} does not say how long a context the model takes (config.json has no "
            "max_position_embeddings). Say it: --context N"
        )
    return found
