"""How likely a model finds given tokens: their log-probabilities, summed by row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from refocused.models.head_loss import IGNORED_LABEL


def label_scores(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    vocabulary: int,
    rows_at_once: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each row's sum of log-probabilities `[B]` and number of labels not ranked first `[B]`.

    Args:
        logits_of: The head: hidden states `[N, D]` to logits `[N, at least vocabulary]`.
        hidden: Final hidden states `[B, T, D]`.
        labels: The tokens that follow `[B, T]`, already shifted; -100 is not counted.
        vocabulary: Ids that can be predicted; the padding above them is left out.
        rows_at_once: Labels whose logits exist at once; None: all. Under ZeRO-3 every call of the
            head is a collective, of which all ranks have to make as many.
    """
    counted = labels != IGNORED_LABEL
    states, wanted = hidden[counted], labels[counted]
    step = rows_at_once or max(1, len(wanted))
    found = [
        _scores(
            logits_of(states[first : first + step])[:, :vocabulary], wanted[first : first + step]
        )
        for first in range(0, max(1, len(wanted)), step)
    ]
    rows = counted.nonzero()[:, 0]
    empty = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
    log_probabilities = torch.cat([sums for sums, _ in found]).double()
    misses = torch.cat([missed for _, missed in found]).double()
    return empty.index_add(0, rows, log_probabilities), empty.index_add(0, rows, misses)


def _scores(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    exact = logits.float()
    own = exact.gather(1, wanted.unsqueeze(1)).squeeze(1)
    return own - exact.logsumexp(dim=1), exact.argmax(dim=1) != wanted
