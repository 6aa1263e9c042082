"""Score one model on all its tasks."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from refocused.evaluate import multiple_choice, perplexity
from refocused.evaluate.continuations import Continuation, Encoder, score_all, tensors_of
from refocused.evaluate.load_model import LoadedModel
from refocused.evaluate.multiple_choice import Examination, TaskResult
from refocused.evaluate.tasks import PERPLEXITY, TaskFile, read_questions
from refocused.models.families import FAMILIES
from refocused.models.head_loss import label_scores
from refocused.system.errors import EvaluationError
from refocused.system.world import World

LOGITS_AT_ONCE = 2**26  # 256 MiB in float32


class NetworkScorer:
    """Scores tokens by a transformers model, without holding the logits of all positions."""

    def __init__(self, network: Any) -> None:
        """Score by a model in evaluation mode, on its own device."""
        self._network = network
        self._vocabulary: int = network.config.vocab_size
        # The logits of our families are the head's product; others may scale or cap them after.
        self._is_known = network.config.model_type in FAMILIES

    def __call__(self, batch: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
        """Return sums of log-probabilities `[B]` and counts of misses `[B]`."""
        network = self._network
        input_ids, labels = (tensor.to(network.device) for tensor in tensors_of(batch))
        with torch.inference_mode():
            if self._is_known:
                head = network.get_output_embeddings()
                hidden = network.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
            else:
                head = torch.nn.Identity()
                hidden = network(input_ids=input_ids, use_cache=False).logits
            return label_scores(
                head,
                hidden,
                labels,
                vocabulary=self._vocabulary,
                rows_at_once=max(1, LOGITS_AT_ONCE // self._vocabulary),
            )


class Evaluation:
    """A model with a tokenizer, ready for tasks; it sees `context_tokens` at once."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        limit: int | None = None,
        batch: int = 16,
        context: int | None = None,
        stride: int | None = None,
    ) -> None:
        """Choose the context, and check the tokenizer.

        Args:
            model: Evaluated on its own device.
            limit: Items of each task, and windows of each text; None: all.
            batch: Endings, or windows, read at once.
            context: Tokens read at once; None: as many as in training.
            stride: New tokens of each window of a text; None: the whole context.

        Raises:
            EvaluationError: The model cannot take the context, or its tokenizer has ids that it
                does not know.
        """
        self._limit, self._batch, self._stride = limit, batch, stride
        self._scorer = NetworkScorer(model.network)
        self.context_tokens = _context_of(model, context)
        self._encoder = Encoder(
            model.tokenizer,
            context_tokens=self.context_tokens,
            vocabulary=model.network.config.vocab_size,
        )

    def run(
        self,
        tasks: Sequence[TaskFile],
        *,
        world: World,
        progress: Callable[[str, int, int], None] = lambda task, done, total: None,
    ) -> list[TaskResult]:
        """Take all tasks; every rank must call, and gets all results.

        Raises:
            EvaluationError: On every rank, before any task begins: a file is invalid.
        """
        results = []
        for one in world.on_all_ranks(lambda: [self._prepare(task) for task in tasks]):
            began = time.monotonic()
            scored = score_all(
                one.continuations,
                self._scorer,
                rows=self._batch,
                world=world,
                progress=functools.partial(progress, one.task),
            )
            assert scored is not None  # nothing stops it
            seconds = time.monotonic() - began
            results.append(dataclasses.replace(one.result(scored), seconds=seconds))
        return results

    def _prepare(self, task: TaskFile) -> Examination:
        if task.form == PERPLEXITY:
            text = perplexity.read_text(task.file)
            return perplexity.prepare(
                task.name, text, self._encoder, stride=self._stride, limit=self._limit
            )
        questions = read_questions(task, limit=self._limit)
        return multiple_choice.prepare(task.name, questions, self._encoder)


def _context_of(model: LoadedModel, wanted: int | None) -> int:
    """Return how many tokens a model sees at once: as wanted, as trained on, or the longest.

    Position embeddings beyond the trained length have learned nothing. A model without a limit
    takes any wanted length.
    """
    limit = model.longest_sequence
    if wanted is not None and limit is not None and wanted > limit:
        raise EvaluationError(
            f"--context {wanted}: {model.source} reads at most {limit} tokens at once (its number "
            f"of positions). Take --context {limit} or less."
        )
    longest = getattr(model.network.config, "max_position_embeddings", None)
    found: int | None = wanted or model.trained_length or longest
    if found is None:
        raise EvaluationError(
            f"{model.source} does not say how long a context the model takes (config.json has no "
            "max_position_embeddings). Say it: --context N"
        )
    return found
