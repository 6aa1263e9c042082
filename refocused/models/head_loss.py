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
        wants_gradient, weight = torch.is_grad_enabled(), self.weight
        if torch.is_autocast_enabled(hidden.device.type):  # which does not reach the products below
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), weight, labels.flatten(), self.chunk_tokens, wants_gradient
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
        weight_gradient = torch.empty_like(weight, dtype=exact) if wants_gradient else None
        room = hidden.new_empty(min(chunk, len(hidden)), len(weight))
        room_of_shares = room if exact == room.dtype else torch.empty_like(room, dtype=exact)
        for start in range(0, max(1, len(hidden)), chunk):
            part = slice(start, start + chunk)
            rows, mask = hidden[part], counted[part].unsqueeze(1)
            logits = torch.mm(rows, weight.T, out=room[: len(rows)])
            index = labels[part].unsqueeze(1).where(mask, 0)
            losses, shares = _losses_and_softmax(logits, index, room_of_shares[: len(rows)])
            total += losses.where(mask, 0.0).sum()
            if hidden_gradient is not None and weight_gradient is not None:
                shares.scatter_add_(1, index, torch.full_like(index, -1.0, dtype=exact))
                slope = shares if exact == logits.dtype else logits.copy_(shares)
                # Rows without a label are silenced in the narrow tensors, not in the slope.
                torch.mm(slope, weight, out=hidden_gradient[part]).mul_(mask)
                _add_product(weight_gradient, slope.T, rows * mask, is_first=start == 0)
        if wants_gradient:
            ctx.save_for_backward(hidden_gradient, weight_gradient, count)
            ctx.weight_dtype = weight.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_gradient, weight_gradient, count = ctx.saved_tensors
        factor = gradient / count
        # In place: a second gradient of the weight's size is what a step's peak is made of.
        return (
            hidden_gradient.mul_(factor),
            weight_gradient.mul_(factor).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """Add `left @ right` to the total, whose content the first one replaces, whatever it is.

    No temporary of the total's size is made where the types allow it.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=0 if is_first else 1)
    elif is_first:
        total.copy_(left @ right)
    else:
        total += left @ right


def _losses_and_softmax(logits: Tensor, index: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's -log softmax at its index `[rows, 1]`, and the softmax in `shares`.

    `shares` may be the logits themselves, which makes the head 1.1 times as fast on a CPU: what a
    kernel writes is still in its cache, and no page is new. Otherwise they are widened into it:
    torch's softmax of bfloat16 in float32 would widen them into memory of its own, on GPUs too.

    The largest share of a row is 1 / sum(exp(logit - largest logit)), never below 1 / V: its
    logarithm is exact where that of an unlikely label's own share would be infinite. The one
    kernel of softmax goes over the logits less often than a log-sum-exp and an exponential.
    """
    exact = shares.dtype
    below_largest = logits.amax(dim=1, keepdim=True).to(exact) - logits.gather(1, index).to(exact)
    if logits.dtype != exact:
        shares.copy_(logits)
    torch.softmax(shares, dim=1, out=shares)
    return below_largest - shares.amax(dim=1, keepdim=True).log(), shares
