"""What a model without attention keeps between calls: a state of constant size for each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RecurrentState:
    """The states of all layers, with what `generate` of transformers asks a cache for.

    Attributes:
        layers: The state of each layer, whatever it is; None before the first token.
        batch_axis: The axis of those tensors that counts sequences.
        positions: Tokens that each sequence has seen, padding left out, `[B]`; None before.
        length: Tokens seen, padding included.
    """

    is_compileable = False  # `generate` need not try

    def __init__(self, layers: int, *, batch_axis: int) -> None:
        self.layers: list[Tensor | None] = [None] * layers
        self.batch_axis = batch_axis
        self.positions: Tensor | None = None
        self.length = 0

    def advance(self, mask: Tensor) -> Tensor:
        """Move on by some tokens; return their positions `[B, T]` (of padding: any).

        Args:
            mask: `[B, T]`, 1 where there is a token and 0 where there is padding.
        """
        before = 0 if self.positions is None else self.positions[:, None]
        positions = before + mask.long().cumsum(dim=1) - 1
        self.positions = positions[:, -1] + 1
        self.length += mask.shape[1]
        return positions.clamp(min=0)

    def get_seq_length(self, layer: int = 0) -> int:
        """Return the tokens seen."""
        return self.length

    def reorder_cache(self, chosen: Tensor) -> None:
        """Keep the sequences that a beam search goes on with, given by their numbers `[B]`."""
        self.layers = [self._chosen(state, chosen) for state in self.layers]
        if self.positions is not None:
            self.positions = self.positions.index_select(0, chosen.to(self.positions.device))

    def _chosen(self, state: Any, chosen: Tensor) -> Any:
        if state is None:
            return None
        return torch.index_select(state, self.batch_axis, chosen.to(state.device))
