"""Score one model on all its tasks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
# Their caches hold one entry a position, so that those of padding can be left out.
SHARING = ("gpt2", "gpt_neox")


class NetworkScorer:
    """Scores tokens by a transformers model, without holding the logits of all positions."""

    def __init__(self, network: Any) -> None:
        """Score by a model in evaluation mode, on its own device."""
        self._network = network
        self._vocabulary: int = network.config.vocab_size
        # The logits of our families are the head's product; others may scale or cap them after.
        self._is_known = network.config.model_type in FAMILIES
        self._shares = network.config.model_type in SHARING

    def __call__(self, batch: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
        """Return sums of log-probabilities `[B]` and counts of misses `[B]`."""
        siblings = [list(rows) for _, rows in itertools.groupby(batch, key=lambda one: one.group)]
        shared = [_shared_tokens(rows) for rows in siblings] if self._shares else []
        with torch.inference_mode():
            if len(siblings) < len(batch) and min(shared, default=0) > 0:
                hidden, labels = self._after_shared(siblings, shared)
            else:
                hidden, labels = self._read(batch)
            return label_scores(
                self._network.get_output_embeddings() if self._is_known else torch.nn.Identity(),
                hidden,
                labels,
                vocabulary=self._vocabulary,
                rows_at_once=max(1, LOGITS_AT_ONCE // self._vocabulary),
            )

    def _read(self, batch: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
        """Return the head's inputs `[B, T, D]` (of unknown families its logits) and the labels."""
        input_ids, labels = (tensor.to(self._network.device) for tensor in tensors_of(batch))
        if not self._is_known:
            return self._network(input_ids=input_ids, use_cache=False).logits, labels
        body = self._network.base_model(input_ids=input_ids, use_cache=False)
        return body.last_hidden_state, labels

    def _after_shared(
        self, siblings: Sequence[Sequence[Continuation]], shared: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Read each shared beginning once, then every ending with the cache of its beginning.

        Beginnings are padded on the right, which causal attention ignores; the padding is masked
        when the endings attend to it.
        """
        device, body = self._network.device, self._network.base_model
        beginnings, rest, owners = [], [], []
        for number, (rows, count) in enumerate(zip(siblings, shared, strict=True)):
            beginnings.append(Continuation(rows[0].ids[: count + 1], 0))
            rest += [Continuation(one.ids[count:], one.scored) for one in rows]
            owners += [number] * len(rows)
        read = body(input_ids=tensors_of(beginnings)[0].to(device), use_cache=True)
        cache = read.past_key_values
        cache.batch_select_indices(torch.tensor(owners, device=device))
        input_ids, labels = (tensor.to(device) for tensor in tensors_of(rest))
        before = torch.tensor(shared, device=device)[owners].unsqueeze(1)
        positions = before + torch.arange(input_ids.shape[1], device=device)
        is_read = torch.arange(max(shared), device=device) < before
        mask = torch.cat([is_read, torch.ones_like(input_ids, dtype=torch.bool)], dim=1)
        # The positions of padding may be beyond the last one that the model knows.
        longest = getattr(self._network.config, "max_position_embeddings", None)
        found = body(
            input_ids=input_ids,
            past_key_values=cache,
            attention_mask=mask.long(),
            position_ids=positions.clamp(max=(longest or int(positions.max()) + 1) - 1),
            use_cache=True,
        )
        return found.last_hidden_state, labels


def _shared_tokens(rows: Sequence[Continuation]) -> int:
    """Count the tokens that all begin with and that precede every scored prediction."""
    most = min(len(one.ids) - 1 - one.scored for one in rows)
    first = rows[0].ids
    for count in range(most):
        if any(one.ids[count] != first[count] for one in rows):
            return count
    return most


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
