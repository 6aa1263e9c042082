"""Score one model on all its tasks."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from refocused.evaluate import multiple_choice, perplexity
from refocused.evaluate.continuations import Continuation, Encoder, tensors_of
from refocused.evaluate.load_model import LoadedModel
from refocused.evaluate.multiple_choice import Examination, TaskResult
from refocused.evaluate.perplexity import Passage
from refocused.evaluate.tasks import PERPLEXITY, TaskFile, read_questions
from refocused.models.families import FAMILIES
from refocused.models.head_loss import label_scores
from refocused.system.errors import EvaluationError
from refocused.system.world import World

LOGITS_AT_ONCE = 2**26  # 256 MiB in float32
# Their caches hold one entry a position, so that those of padding can be left out.
SHARING = ("gpt2", "gpt_neox")


class NetworkScorer:
    """Rates tokens by transformers' model, without ever holding the logits of all positions.

    Attributes:
        vocabulary: Ids that the model knows.
        context_tokens: Longest context that it takes; None: its configuration does not say.
    """

    def __init__(self, network: Any) -> None:
        """Rate by a model in evaluation mode, where it is."""
        self._network = network
        self.vocabulary: int = network.config.vocab_size
        self.context_tokens: int | None = getattr(network.config, "max_position_embeddings", None)
        # The logits of our families are the head's product; others may scale or cap them after.
        self._is_known = network.config.model_type in FAMILIES
        self._shares = network.config.model_type in SHARING

    def __call__(self, batch: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
        """Return sums of log-probabilities `[B]` and counts of misses `[B]`."""
        siblings = [list(rows) for _, rows in itertools.groupby(batch, key=lambda one: one.group)]
        shared = [shared_tokens(rows) for rows in siblings] if self._shares else []
        with torch.inference_mode():
            if len(siblings) < len(batch) and min(shared, default=0) > 0:
                hidden, labels = self._after_shared(siblings, shared)
            else:
                hidden, labels = self._read(batch)
            return label_scores(
                self._network.get_output_embeddings() if self._is_known else torch.nn.Identity(),
                hidden,
                labels,
                vocabulary=self.vocabulary,
                rows_at_once=max(1, LOGITS_AT_ONCE // self.vocabulary),
            )

    def _read(self, batch: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
        """Return what the head gets, `[B, T, D]`, or gives in families unknown here; and labels."""
        device = self._network.device
        input_ids, labels = (tensor.to(device) for tensor in tensors_of(batch))
        if not self._is_known:
            return self._network(input_ids=input_ids, use_cache=False).logits, labels
        body = self._network.base_model(input_ids=input_ids, use_cache=False)
        return body.last_hidden_state, labels

    def _after_shared(
        self, siblings: Sequence[Sequence[Continuation]], shared: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Read each beginning once, then every ending with the cache of its own beginning.

        Beginnings are padded on the right, where they look back at themselves alone, and their
        padding is masked when the endings look back.
        """
        device, body = self._network.device, self._network.base_model
        beginnings = [
            Continuation(rows[0].ids[: count + 1], 0)
            for rows, count in zip(siblings, shared, strict=True)
        ]
        read = body(input_ids=tensors_of(beginnings)[0].to(device), use_cache=True)
        cache = read.past_key_values
        owners = [number for number, rows in enumerate(siblings) for _ in rows]
        cache.batch_select_indices(torch.tensor(owners, device=device))
        rest = [
            Continuation(one.ids[count:], one.scored)
            for rows, count in zip(siblings, shared, strict=True)
            for one in rows
        ]
        input_ids, labels = (tensor.to(device) for tensor in tensors_of(rest))
        before = torch.tensor(shared, device=device)[owners].unsqueeze(1)
        places = torch.arange(input_ids.shape[1], device=device)
        longest = torch.arange(max(shared), device=device)
        positions = before + places
        mask = torch.cat([longest < before, torch.ones_like(input_ids, dtype=torch.bool)], dim=1)
        limit = self.context_tokens or int(positions.max()) + 1
        found = body(
            input_ids=input_ids,
            past_key_values=cache,
            attention_mask=mask.long(),
            position_ids=positions.clamp(max=limit - 1),  # that of padding may be beyond the last
            use_cache=True,
        )
        return found.last_hidden_state, labels


def shared_tokens(rows: Sequence[Continuation]) -> int:
    """Count the tokens that all begin with and that precede every prediction that is scored."""
    most = min(len(one.ids) - 1 - one.scored for one in rows)
    first = rows[0].ids
    for count in range(most):
        if any(one.ids[count] != first[count] for one in rows):
            return count
    return most


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
            model.tokenizer, context_tokens=self.context_tokens, vocabulary=self._scorer.vocabulary
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
