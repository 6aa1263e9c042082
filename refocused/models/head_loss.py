"""The language-model head that returns the mean cross-entropy without ever holding all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

IGNORED_LABEL = -100


class LossHead(nn.Linear):
    """A linear head that gives logits, or the loss when labels come along.

    The loss has to be computed here: under ZeRO-3 the weight is only whole while its own module
    runs. It is walked in chunks of tokens, and each chunk's gradient is taken at once, so that
    the largest temporary is `[chunk, V]`.
    """

    def __init__(self, weight: nn.Parameter, *, chunk_tokens: int) -> None:
        """Take over a weight `[V, D]`, which may be tied to the embedding."""
        vocabulary, width = weight.shape
        super().__init__(width, vocabulary, bias=False, device="meta")
        self.weight = weight
        self.chunk_tokens = chunk_tokens

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits `[..., V]`, or the mean loss over labels that are not -100.

        Args:
            hidden: Hidden states `[..., D]`.
            labels: Ids of the *next* tokens, already shifted, of the shape `[...]`.
        """
        if labels is None:
            return super().forward(hidden)
        wants_gradient = torch.is_grad_enabled()
        loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), self.weight, labels.flatten(), self.chunk_tokens, wants_gradient
        )
        return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T` with the gradient taken chunk by chunk.

    d loss / d logits = (softmax(logits) - onehot(label)) / number of labels. The division and
    the incoming gradient (which carries fp16's loss scale) are applied in the backward pass, so
    that half-precision products see values near one and nothing underflows.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, wants_gradient: bool
    ) -> Tensor:
        counted = labels != IGNORED_LABEL
        count = counted.sum().clamp(min=1)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if wants_gradient else None
        weight_gradient = torch.zeros_like(weight, dtype=exact) if wants_gradient else None
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            rows, mask = hidden[part], counted[part].unsqueeze(1)
            logits = (rows @ weight.T).to(exact)
            index = labels[part].unsqueeze(1).where(mask, 0)
            log_normalizer = logits.logsumexp(dim=1, keepdim=True)
            total += (log_normalizer - logits.gather(1, index)).where(mask, 0.0).sum()
            if hidden_gradient is not None and weight_gradient is not None:
                slope = _slope(logits, log_normalizer, index, mask).to(hidden.dtype)
                torch.mm(slope, weight, out=hidden_gradient[part])
                _add_product(weight_gradient, slope.T, rows)
        if wants_gradient:
            ctx.save_for_backward(hidden_gradient, weight_gradient, count)
            ctx.weight_dtype = weight.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_gradient, weight_gradient, count = ctx.saved_tensors
        factor = gradient / count
        return (
            (hidden_gradient * factor).to(hidden_gradient.dtype),
            (weight_gradient * factor).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to the total, without a temporary of its size where the types allow."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _slope(logits: Tensor, log_normalizer: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(logits) - onehot(index) `[rows, V]` in place of the logits; 0 where masked."""
    slope = logits.sub_(log_normalizer).exp_()
    slope.scatter_add_(1, index, torch.full_like(index, -1.0, dtype=slope.dtype))
    return slope.mul_(mask)
