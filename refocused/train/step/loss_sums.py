"""The mean loss over windows that the ranks share."""

from __future__ import annotations

import dataclasses

import torch

from refocused.data.loader.batch import IGNORED_LABEL, Batch
from refocused.system.world import World


@dataclasses.dataclass(frozen=True, slots=True)
class ValidationLoss:
    """Mean losses over all ranks, in nats a token.

    Attributes:
        mean: Over all windows.
        by_source: Over those of each source of a mixture.
    """

    mean: float
    by_source: dict[str, float]


class LossSums:
    """Sums the losses of this rank's batches, by source."""

    def __init__(self) -> None:
        """Start without any."""
        self._sums: dict[str | None, list[float]] = {}  # total loss, tokens

    def add(self, batch: Batch, loss: torch.Tensor) -> None:
        """Add a batch with the mean loss over its tokens."""
        counted = int((batch.labels != IGNORED_LABEL).sum())
        own = self._sums.setdefault(batch.source, [0.0, 0.0])
        own[0] += float(loss) * counted
        own[1] += counted

    def mean(self, world: World) -> ValidationLoss | None:
        """Return the mean losses over all ranks, None without data; every rank must call."""
        # Every rank has batches of the same sources, in the same order.
        flat = world.total([number for own in self._sums.values() for number in own])
        losses, tokens = flat[0::2], flat[1::2]
        if not sum(tokens):
            return None
        return ValidationLoss(
            mean=sum(losses) / sum(tokens),
            by_source={
                name: total / counted
                for name, total, counted in zip(self._sums, losses, tokens, strict=True)
                if name is not None and counted
            },
        )
