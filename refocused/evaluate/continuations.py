"""Continuations of contexts as tokens, in batches of like length, and what a model gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from refocused.models.head_loss import IGNORED_LABEL
from refocused.system.errors import EvaluationError
from refocused.system.world import World
from refocused.tokenizers.encoders import tokenizer_faults


@dataclasses.dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens, of which the last ones are scored.

    Attributes:
        ids: At most one more than the model's context.
        scored: How many at the end are scored.
        is_cut: Whether the beginning of the context was left out.
        group: Number of the question; those of one question mostly begin alike.
    """

    ids: tuple[int, ...]
    scored: int
    is_cut: bool = False
    group: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """What a model gives a continuation.

    Attributes:
        log_probability: Of all scored tokens together, in nats.
        is_greedy: Whether each of them is what the model finds likeliest.
    """

    log_probability: float
    is_greedy: bool


class Scorer(Protocol):
    """A model that rates tokens; see `refocused.models.head_loss`."""

    def __call__(self, batch: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
        """Return sums of log-probabilities `[B]` and counts of misses `[B]`."""
        ...


class Encoder:
    """Turns pairs of texts into continuations, as lm-evaluation-harness does."""

    def __init__(self, tokenizer: Any, *, context_tokens: int, vocabulary: int) -> None:
        """Encode with a tokenizer of transformers.

        Args:
            tokenizer: It may put its own tokens around a text.
            context_tokens: Tokens that the model sees at once.
            vocabulary: Ids that the model knows.

        Raises:
            EvaluationError: The tokenizer has other ids.
        """
        largest = max(tokenizer.get_vocab().values(), default=-1)
        if largest >= vocabulary:
            raise EvaluationError(
                f"The tokenizer has ids up to {largest:,}, and the model knows {vocabulary:,}. "
                "Name the tokenizer that the model was trained with."
            )
        self._tokenizer = tokenizer
        self.context_tokens = context_tokens

    @property
    def end_of_text_id(self) -> int | None:
        """What precedes a text that begins a document; None: the tokenizer has no such token."""
        first = self._tokenizer.bos_token_id
        found: int | None = self._tokenizer.eos_token_id if first is None else first
        return found

    def encode(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        """Return the ids of each text."""
        if not texts:
            return []
        with tokenizer_faults("The tokenizer"):
            found: list[list[int]] = self._tokenizer(
                list(texts), return_attention_mask=False, verbose=False, **options
            )["input_ids"]
        return found

    def offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Return a text's ids, and where in it each one ends."""
        with tokenizer_faults("The tokenizer"):
            found = self._tokenizer(text, return_offsets_mapping=True, verbose=False)
        return found["input_ids"], [end for _, end in found["offset_mapping"]]

    def continuations(
        self, pairs: Sequence[tuple[str, str]], *, places: Sequence[str], groups: Sequence[int]
    ) -> list[Continuation | None]:
        """Encode contexts with what follows them.

        White space at the end of a context goes to the continuation, and the tokens scored are
        those that the whole has beyond the context's own number. An empty context is the
        end-of-text token. A context that is too long loses its beginning.

        Args:
            pairs: Contexts and continuations.
            places: Where each pair comes from.
            groups: Question of each pair.

        Returns:
            In the order of the pairs; None for a continuation longer than the model's context.

        Raises:
            EvaluationError: A continuation has no token of its own, or a context is empty and the
                tokenizer has no end-of-text token.
        """
        moved = [_without_trailing_space(*pair) for pair in pairs]
        known = list(dict.fromkeys(context for context, _ in moved))
        lengths = {
            context: len(ids) for context, ids in zip(known, self.encode(known), strict=True)
        }
        wholes = self.encode([context + rest for context, rest in moved])
        return [
            self._continuation(context, whole, lengths[context], place=place, group=group)
            for (context, _), whole, place, group in zip(moved, wholes, places, groups, strict=True)
        ]

    def _continuation(
        self, context: str, whole: list[int], begins: int, *, place: str, group: int
    ) -> Continuation | None:
        if not context:
            whole, begins = self._begun(whole, place)
        scored = len(whole) - begins
        if scored < 1:
            raise EvaluationError(f"{place}: an ending adds no token to its context.")
        if scored > self.context_tokens:
            return None
        kept = whole[-(self.context_tokens + 1) :]
        return Continuation(tuple(kept), scored, is_cut=len(kept) < len(whole), group=group)

    def _begun(self, ids: list[int], place: str) -> tuple[list[int], int]:
        """Put the end-of-text token before a text, unless it begins so."""
        first = self.end_of_text_id
        if first is None:
            raise EvaluationError(
                f"{place}: the context is empty, and the tokenizer has no end-of-text token to "
                "begin with. Give the item a context."
            )
        return (ids, 1) if ids[:1] == [first] else ([first, *ids], 1)


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

    Every rank calls the scorer as often as the others, with a row of nothing when it has no batch.

    Args:
        continuations: The same ones on every rank.
        scorer: The model.
        rows: Continuations of one batch.
        tokens: Most tokens of one batch, padding included; None: no limit.
        world: The ranks.
        stopping: Asked after each batch, alike on all ranks; a true answer ends it.
        progress: Told how many of how many batches are done.

    Returns:
        In the order of the continuations; None when stopped.
    """
    batches = batches_by_length(continuations, rows=rows, tokens=tokens)
    found: dict[int, Scored] = {}
    rounds = range(0, len(batches), world.world_size)
    for turn, first in enumerate(rounds, start=1):
        mine = batches[first + world.rank] if first + world.rank < len(batches) else []
        found |= _score(mine, continuations, scorer)
        progress(turn, len(rounds))
        if stopping():
            return None
    everything: dict[int, Scored] = {}
    for part in world.gather(found):
        everything |= part
    return [everything[number] for number in range(len(continuations))]


def batches_by_length(
    continuations: Sequence[Continuation], *, rows: int, tokens: int | None = None
) -> list[list[int]]:
    """Return the numbers of the continuations in batches, the longest first, by question.

    A batch that does not fit into memory shows at once then, and padding is least.
    """
    longest: dict[int, int] = {}
    for one in continuations:
        longest[one.group] = max(longest.get(one.group, 0), len(one.ids))

    def place(number: int) -> tuple[int, int]:
        group = continuations[number].group
        return -longest[group], group

    order = sorted(range(len(continuations)), key=place)
    batches: list[list[int]] = []
    room = 0
    for number in order:
        if not batches or len(batches[-1]) == room:
            batches.append([])
            length = max(1, longest[continuations[number].group] - 1)
            room = rows if tokens is None else max(1, min(rows, tokens // length))
        batches[-1].append(number)
    return batches


def tensors_of(continuations: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
    """Return inputs and labels `[B, T]`, padded on the right, where a causal model looks last."""
    length = max((len(one.ids) - 1 for one in continuations), default=1)
    shape = (max(1, len(continuations)), length)
    input_ids = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORED_LABEL)
    for row, one in enumerate(continuations):
        last = len(one.ids) - 1
        input_ids[row, :last] = torch.tensor(one.ids[:-1])
        labels[row, last - one.scored : last] = torch.tensor(one.ids[last + 1 - one.scored :])
    return input_ids, labels


def _score(
    batch: Sequence[int], continuations: Sequence[Continuation], scorer: Scorer
) -> Mapping[int, Scored]:
    sums, misses = scorer([continuations[number] for number in batch])
    return {
        number: Scored(total, not missed)
        for number, total, missed in zip(batch, sums.tolist(), misses.tolist(), strict=False)
    }


def _without_trailing_space(context: str, continuation: str) -> tuple[str, str]:
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation
