"""A loaded model as a scorer of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from refocused.models.build import FAMILIES
from refocused.models.label_scores import label_scores

LOGITS_AT_ONCE = 2**26  # 256 MiB in float32


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

    def __call__(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums of log-probabilities `[B]` and counts of misses `[B]` for `[B, T]`."""
        device = self._network.device
        input_ids, labels = input_ids.to(device), labels.to(device)
        with torch.inference_mode():
            if self._is_known:
                body = self._network.base_model(input_ids=input_ids, use_cache=False)
                hidden, head = body.last_hidden_state, self._network.get_output_embeddings()
            else:
                hidden = self._network(input_ids=input_ids, use_cache=False).logits
                head = torch.nn.Identity()
            return label_scores(
                head,
                hidden,
                labels,
                vocabulary=self.vocabulary,
                rows_at_once=max(1, LOGITS_AT_ONCE // self.vocabulary),
            )
