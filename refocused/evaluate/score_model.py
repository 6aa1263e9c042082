"""Score one model on all its tasks; the perplexity of texts, by token and by byte."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refocused.config.model_shape import families
from refocused.evaluate import multiple_choice
from refocused.evaluate.continuations import (
    Continuation,
    Encoder,
    Scored,
    bits_per_byte,
    score_all,
    tensors_of,
)
from refocused.evaluate.core import encode_task
from refocused.evaluate.load_model import LoadedModel
from refocused.evaluate.tasks import PERPLEXITY, TaskFile
from refocused.models.causal_lm import softcap_of
from refocused.models.head_loss import LogitTerms, label_scores
from refocused.system.errors import EvaluationError
from refocused.system.world import World

LOGITS_AT_ONCE = 2**26  # 256 MiB in float32


class NetworkScorer:
    """Scores tokens by a transformers model, without holding the logits of all positions."""

    def __init__(self, network: Any) -> None:
        """Score by a model in evaluation mode, on its own device."""
        self._network = network
        self._vocabulary: int = network.config.vocab_size
        # The logits of our families are the head's product, maybe capped; others may scale them.
        self._is_known = network.config.model_type in families()

    def __call__(self, batch: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
        """Return sums of log-probabilities `[B]` and counts of misses `[B]`."""
        network, rows = self._network, max(1, LOGITS_AT_ONCE // self._vocabulary)
        ids, labels = (tensor.to(network.device) for tensor in tensors_of(batch))

        def logits(hidden: Tensor) -> Tensor:
            head = network.get_output_embeddings()
            return LogitTerms(softcap_of(network)).cap(head(hidden)) if self._is_known else hidden

        with torch.inference_mode():
            if self._is_known:
                hidden = network.base_model(input_ids=ids, use_cache=False).last_hidden_state
            else:
                hidden = network(input_ids=ids, use_cache=False).logits
            size = self._vocabulary
            return label_scores(logits, hidden, labels, vocabulary=size, rows_at_once=rows)


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
            limit: Items of each task, and sequences of each text; None: all.
            batch: Endings, or sequences, read at once.
            context: Tokens read at once; None: as many as in training.
            stride: New tokens of each sequence of a text; None: the whole context.

        Raises:
            EvaluationError: The model cannot take the context, or its tokenizer has ids that it
                does not know.
        """
        self._limit, self._batch, self._stride = limit, batch, stride
        self._scorer = NetworkScorer(model.network)
        most, config = model.longest_sequence, model.network.config
        if context is not None and most is not None and context > most:
            raise EvaluationError(
                f"--context {context}: {model.source} reads at most {most} tokens at once (its "
                f"number of positions). Take --context {most} or less."
            )
        # Position embeddings beyond the trained length have learned nothing.
        longest: int | None = getattr(config, "max_position_embeddings", None)
        if (tokens := context or model.trained_length or longest) is None:
            raise EvaluationError(
                f"{model.source} does not say how long a context the model takes (config.json has "
                "no max_position_embeddings). Say it: --context N"
            )
        self.context_tokens = tokens
        self._encoder = Encoder(
            model.tokenizer, context_tokens=tokens, vocabulary=config.vocab_size
        )

    def run(
        self,
        tasks: Sequence[TaskFile],
        *,
        world: World,
        progress: Callable[[str, int, int], None] = lambda task, done, total: None,
    ) -> list[multiple_choice.TaskResult]:
        """Take all tasks; every rank must call, and gets all results.

        Raises:
            EvaluationError: On every rank, before any task begins: a file is invalid.
        """

        def prepared(task: TaskFile) -> multiple_choice.EncodedTask:
            limit, encoder = self._limit, self._encoder
            if task.form != PERPLEXITY:
                return encode_task(task, encoder, limit=limit)
            text = read_text(task.file)
            return prepare_text(task.name, text, encoder, stride=self._stride, limit=limit)

        results = []
        for examination in world.on_all_ranks(lambda: [prepared(task) for task in tasks]):
            began = time.monotonic()
            show = functools.partial(progress, examination.task)
            scored = score_all(
                examination.continuations,
                self._scorer,
                rows=self._batch,
                world=world,
                progress=show,
            )
            assert scored is not None  # nothing stops it
            seconds = time.monotonic() - began
            results.append(dataclasses.replace(examination.result(scored), seconds=seconds))
        return results


def read_text(file: Path) -> str:
    """Read a text; raise EvaluationError if it cannot be read, is not UTF-8, or is empty."""
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        raise EvaluationError(f"{file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise EvaluationError(
            f"{file}: byte {error.start:,} is not UTF-8. Convert the file to UTF-8."
        ) from None
    if not text:
        raise EvaluationError(f"{file} is empty. Name a file with text.")
    return text


def prepare_text(
    task: str, text: str, encoder: Encoder, *, stride: int | None = None, limit: int | None = None
) -> multiple_choice.EncodedTask:
    """Cut a text into sequences of `stride` new tokens, the whole context unless given.

    At most `limit` sequences are scored.

    Raises:
        EvaluationError: The text is too short to score, or the stride exceeds the context.
    """
    context = encoder.context_tokens
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise EvaluationError(f"--stride {stride}: a number from 1 to the context, {context}.")
    ids, ends = encoder.offsets(text)
    first = encoder.end_of_text_id
    every = rolling_sequences(ids, first=first, context=context, stride=stride)
    sequences = every[:limit]
    if not sequences:
        raise EvaluationError(f"{task}: the text has {len(ids)} tokens, too few to score one.")
    begin = 0 if first is not None else 1  # where the first token is only context
    last = begin + sum(sequence.scored for sequence in sequences) - 1
    end = ends[last] if len(sequences) < len(every) else len(text)
    text_bytes = len(text[ends[begin - 1] if begin else 0 : end].encode())
    measure = functools.partial(perplexities_of, sequences, text_bytes=text_bytes)
    return multiple_choice.EncodedTask(task, len(sequences), sequences, measure)


def rolling_sequences(
    ids: Sequence[int], *, first: int | None, context: int, stride: int
) -> list[Continuation]:
    """Return sequences that score every token once, each with as much before it as the model sees.

    As lm-evaluation-harness does at a stride of the whole context (its
    `get_rolling_token_sequences`), and transformers' guide to perplexity otherwise. Without a
    `first` token before the text, its own first token is not scored.
    """
    whole = [*ids] if first is None else [first, *ids]
    sequences: list[Continuation] = []
    done = 1
    while done < len(whole):
        end = min(len(whole), done + (stride if sequences else context))
        begin = max(0, end - context - 1)
        sequences.append(Continuation(tuple(whole[begin:end]), end - done))
        done = end
    return sequences


def perplexities_of(
    sequences: Sequence[Continuation], scored: Sequence[Scored], *, text_bytes: int
) -> dict[str, multiple_choice.Measure]:
    """Return the perplexity by token and by byte, and the bits that a byte takes.

    The standard errors are those of a ratio of sums over sequences: with loss r = sum(l) / sum(n),
    var(r) = w / (w - 1) sum((l - r n)^2) / sum(n)^2 (Cochran, Sampling Techniques, 2.11), carried
    over to functions of r by their derivative.
    """
    counts = [sequence.scored for sequence in sequences]
    losses = [-score.log_probability for score in scored]
    tokens = sum(counts)
    loss = sum(losses) / tokens
    error = None
    if len(sequences) > 1:
        spread = sum((part - loss * n) ** 2 for part, n in zip(losses, counts, strict=True))
        error = math.sqrt(spread * len(sequences) / (len(sequences) - 1)) / tokens

    def scaled(factor: float) -> tuple[float, float | None]:
        return loss * factor, None if error is None else error * factor

    by_byte = tokens / text_bytes
    return {
        "perplexity": multiple_choice.exponential(loss, error),
        "byte_perplexity": multiple_choice.exponential(*scaled(by_byte)),
        "bits_per_byte": multiple_choice.Measure(*scaled(bits_per_byte(tokens, text_bytes))),
    }
