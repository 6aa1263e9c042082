"""A loaded model as a scorer of tokens, which reads what several endings begin with only once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from refocused.evaluate.continuations import Continuation, tensors_of
from refocused.models.families import FAMILIES
from refocused.models.head_loss import label_scores

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
