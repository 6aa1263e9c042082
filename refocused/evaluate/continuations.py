"""Score continuations of contexts in batches of similar length; sum the losses of batches."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from refocused.models.head_loss import IGNORED_LABEL
from refocused.system.errors import EvaluationError, tokenizer_errors
from refocused.system.world import World


@dataclasses.dataclass(frozen=True, slots=True)
class Continuation:
    """Token ids; the last ones are scored."""

    ids: Sequence[int]  # at most one more than the model's context
    scored: int  # number of ids scored, at the end
    is_cut: bool = False  # the beginning of the context was cut


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """A model's score of a continuation."""

    log_probability: float  # sum over the scored tokens, in nats
    is_greedy: bool  # each of them has the highest probability


# A model: sums of log-probabilities `[B]` and counts of misses `[B]`, see models/head_loss.py.
Scorer = Callable[[Sequence[Continuation]], tuple[Tensor, Tensor]]


class Encoder:
    """Turns pairs of texts into continuations, as lm-evaluation-harness does."""

    def __init__(self, tokenizer: Any, *, context_tokens: int, vocabulary: int) -> None:
        """Use a transformers tokenizer; raise EvaluationError if it has ids beyond `vocabulary`."""
        largest = max(tokenizer.get_vocab().values(), default=-1)
        if largest >= vocabulary:
            raise EvaluationError(
                f"The tokenizer has ids up to {largest:,}, but the model's vocabulary has only "
                f"{vocabulary:,}. Name the tokenizer that the model was trained with."
            )
        self._tokenizer = tokenizer
        self.context_tokens = context_tokens
        first = tokenizer.bos_token_id
        # What precedes a text that begins a document; None: the tokenizer has no such token.
        self.end_of_text_id: int | None = tokenizer.eos_token_id if first is None else first

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        if not texts:
            return []
        with tokenizer_errors("The tokenizer"):
            encoded = self._tokenizer(list(texts), return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])

    def offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Return a text's ids, and where in the text each one ends."""
        with tokenizer_errors("The tokenizer"):
            encoded = self._tokenizer(text, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], [end for _, end in encoded["offset_mapping"]]

    def continuations(
        self, pairs: Sequence[tuple[str, str]], *, places: Sequence[str]
    ) -> list[Continuation | None]:
        """Encode pairs of a context and its continuation, each with its place in a file.

        White space at the end of a context moves to the continuation. The tokens after those of the
        context are scored. An empty context is the end-of-text token. A context that is too long
        loses its beginning. A continuation longer than the model's context gives None, and so does
        one without a token of its own, because a token spans the join (lm-evaluation-harness fails
        there).

        Raises:
            EvaluationError: A context is empty and the tokenizer has no end-of-text token.
        """
        contexts = [context.rstrip() for context, _ in pairs]
        known = list(dict.fromkeys(contexts))
        lengths = dict(zip(known, map(len, self.encode(known)), strict=True))
        wholes = self.encode([context + rest for context, rest in pairs])
        encoded: list[Continuation | None] = []
        for context, whole, place in zip(contexts, wholes, places, strict=True):
            begins, first = lengths[context], self.end_of_text_id
            if not context and first is None:
                raise EvaluationError(
                    f"{place}: the context is empty, and the tokenizer has no end-of-text token to "
                    "begin with. Give the item a context."
                )
            if not context and first is not None:
                whole, begins = (whole if whole[:1] == [first] else [first, *whole]), 1
            scored, kept = len(whole) - begins, tuple(whole[-(self.context_tokens + 1) :])
            fits = 1 <= scored <= self.context_tokens
            is_cut = len(kept) < len(whole)
            encoded.append(Continuation(kept, scored, is_cut=is_cut) if fits else None)
        return encoded


def score_all(
    continuations: Sequence[Continuation],
    scorer: Scorer,
    *,
    rows: int,
    tokens: int | None = None,
    world: World,
    stopping: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Scored] | None:
    """Score all continuations, shared by the ranks; every rank must call and gets all.

    Every rank calls the scorer equally often, with an empty batch if none is left for it. A batch
    has at most `rows` rows, and `tokens` tokens with padding (None: no limit). `stopping` is called
    after each batch and must agree on all ranks; if true, the result is None. `progress` receives
    the number of batches done and the total.
    """
    batches = batches_by_length(continuations, rows=rows, tokens=tokens)
    scores: dict[int, Scored] = {}
    rounds = range(0, len(batches), world.world_size)
    for turn, first in enumerate(rounds, start=1):
        mine = batches[first + world.rank] if first + world.rank < len(batches) else []
        sums, misses = scorer([continuations[number] for number in mine])
        for number, total, missed in zip(mine, sums.tolist(), misses.tolist(), strict=False):
            scores[number] = Scored(total, not missed)
        progress(turn, len(rounds))
        if stopping():
            return None
    everything = {number: score for part in world.gather(scores) for number, score in part.items()}
    return [everything[number] for number in range(len(continuations))]


def batches_by_length(
    continuations: Sequence[Continuation], *, rows: int, tokens: int | None = None
) -> list[list[int]]:
    """Return the numbers of the continuations in batches, the longest first.

    A lack of memory then shows at once, and batches have little padding.
    """
    batches: list[list[int]] = []
    room = 0
    order = sorted(range(len(continuations)), key=lambda number: -len(continuations[number].ids))
    for number in order:
        if not batches or len(batches[-1]) == room:
            batches.append([])
            length = max(1, len(continuations[number].ids) - 1)
            room = rows if tokens is None else max(1, min(rows, tokens // length))
        batches[-1].append(number)
    return batches


def tensors_of(continuations: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
    """Return inputs and labels `[B, T]`, padded on the right."""
    some = continuations or [Continuation((0, 0), 0)]
    inputs = [torch.tensor(list(continuation.ids[:-1])) for continuation in some]
    labels = [torch.tensor(list(continuation.ids[1:])) for continuation in some]
    for row, continuation in zip(labels, some, strict=True):
        row[: len(row) - continuation.scored] = IGNORED_LABEL
    padded = pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL)
    return pad_sequence(inputs, batch_first=True), padded


@dataclasses.dataclass(frozen=True, slots=True)
class ValidationLoss:
    """The loss over all sequences of all ranks, and over those of each source of a mixture."""

    mean: float  # nats a token
    bits_per_byte: float | None = None  # None: the ids have no known lengths in bytes
    by_source: Mapping[str, "ValidationLoss"] = dataclasses.field(default_factory=dict)


def bits_per_byte(nats: float, text_bytes: float) -> float:
    """Return the loss by byte of text, in bits, which does not depend on the tokenizer.

    As lm-evaluation-harness's `bits_per_byte` of a text, and nanochat's `evaluate_bpb` of batches.
    """
    return nats / text_bytes / math.log(2)


class LossSums:
    """Sums the losses of this rank's batches, by source.

    Bits per byte count the labels that stand for text: special tokens are in neither sum.
    """

    def __init__(self, byte_lengths: Tensor | None = None) -> None:
        """Count bytes by `byte_lengths`, those of each id `[V]`, on the batches' device."""
        self._byte_lengths = byte_lengths
        # Losses, tokens, losses of tokens that stand for text, their bytes.
        self._sums: dict[str | None, list[float]] = {}

    def add(self, source: str | None, losses: Tensor, labels: Tensor) -> None:
        """Add a batch of a source: the loss of each label `[B, T]`, and the labels."""
        losses, counted = losses.double(), labels != IGNORED_LABEL
        on_device = [losses.sum(), counted.sum()]
        if self._byte_lengths is not None:
            sizes = self._byte_lengths[labels.where(counted, 0)].where(counted, 0)
            on_device += [losses.where(sizes > 0, 0.0).sum(), sizes.sum()]
        added = torch.stack([value.double() for value in on_device]).tolist()  # one wait
        sums = self._sums.setdefault(source, [0.0] * 4)
        self._sums[source] = [a + b for a, b in itertools.zip_longest(sums, added, fillvalue=0.0)]

    def mean(self, world: World) -> ValidationLoss | None:
        """Return the mean losses over all ranks, None without data; every rank must call."""
        # Every rank has batches of the same sources, in the same order.
        flat = world.total([number for sums in self._sums.values() for number in sums])
        columns = [flat[part::4] for part in range(4)]
        if not sum(columns[1]):
            return None
        by_source = {
            name: _loss_of(*sums)
            for name, *sums in zip(self._sums, *columns, strict=True)
            if name is not None and sums[1]
        }
        return dataclasses.replace(_loss_of(*map(sum, columns)), by_source=by_source)


def _loss_of(losses: float, tokens: float, of_text: float, text_bytes: float) -> ValidationLoss:
    bits = bits_per_byte(of_text, text_bytes) if text_bytes else None
    return ValidationLoss(losses / tokens, bits)
