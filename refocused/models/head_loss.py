"""The language-model head: mean cross-entropy, or scores of labels, without holding all logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HeadForm = Literal["chunked", "fused", "kernel"]
RowLosses = Callable[[Tensor, Tensor, Tensor], Tensor]  # of logits, labels, room for the slopes
IGNORED_LABEL = -100


class LossHead(nn.Linear):
    """A linear head that gives logits, or the loss when labels come along.

    The loss has to be computed here: under ZeRO-3 the weight is only whole while its own module
    runs. It is walked in chunks of tokens, and each chunk's gradient is taken at once, so that
    the largest temporary is `[chunk, V]`.
    """

    form: HeadForm = "chunked"  # what computes the loss; see `head_loss`

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
        weight: Tensor = self.weight
        if torch.is_autocast_enabled(hidden.device.type):  # which does not reach the products below
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        return head_loss(
            self.form, hidden.flatten(0, -2), weight, labels.flatten(), chunk=self.chunk_tokens
        )


def head_loss(
    form: HeadForm, hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int
) -> Tensor:
    """Return the mean cross-entropy of `hidden @ weight.T` over labels that are not -100.

    `chunked` and `kernel` are ours: each chunk of logits is differentiated by torch's operations or
    by one Triton kernel. `fused` is torch's own, which torch 2.11 lacks.
    """
    if form == "fused":
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        # Its own mean is nan without labels, and its slopes underflow in fp16.
        total = F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)
        return total / (labels != IGNORED_LABEL).sum().clamp(min=1)
    row_losses: RowLosses = _losses_and_slopes
    if form == "kernel":
        from refocused.models.head_kernel import kernel_losses as row_losses  # needs Triton
    loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, chunk, torch.is_grad_enabled(), row_losses
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
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        wants_gradient: bool,
        row_losses: RowLosses,
    ) -> Tensor:
        counted = labels != IGNORED_LABEL
        count = counted.sum().clamp(min=1)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if wants_gradient else None
        weight_gradient = torch.empty_like(weight, dtype=exact) if wants_gradient else None
        room = hidden.new_empty(min(chunk, len(hidden)), len(weight))
        in_place = row_losses is not _losses_and_slopes or exact == room.dtype
        room_of_slopes = room if in_place else torch.empty_like(room, dtype=exact)
        for start in range(0, max(1, len(hidden)), chunk):
            part = slice(start, start + chunk)
            rows, mask = hidden[part], counted[part].unsqueeze(1)
            logits = torch.mm(rows, weight.T, out=room[: len(rows)])
            index = labels[part].unsqueeze(1).where(mask, 0)
            slopes = room_of_slopes[: len(rows)]
            total += row_losses(logits, index, slopes).where(mask, 0.0).sum()
            if hidden_gradient is not None and weight_gradient is not None:
                narrow = slopes if slopes.dtype == logits.dtype else logits.copy_(slopes)
                # Rows without a label are silenced in the narrow tensors, not in the slopes.
                torch.mm(narrow, weight, out=hidden_gradient[part]).mul_(mask)
                beta = 0 if start == 0 else 1  # 0 replaces the content, whatever it is
                _add_product(weight_gradient, narrow, slopes, rows * mask, beta=beta)
        if wants_gradient:
            ctx.save_for_backward(hidden_gradient, weight_gradient, count)
            ctx.weight_dtype = weight.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient, count = ctx.saved_tensors
        factor = gradient / count
        # In place: a second gradient of the weight's size is what a step's peak is made of.
        return (
            hidden_gradient.mul_(factor),
            weight_gradient.mul_(factor).to(ctx.weight_dtype),
            *(None, None, None, None),
        )


def _add_product(
    total: Tensor, narrow: Tensor, slopes: Tensor, rows: Tensor, *, beta: float
) -> None:
    """Make the total `beta * total + slopes.T @ rows`, without a temporary of its size.

    `narrow` are the slopes in the type of the rows; `slopes` may be in that of the total.
    """
    if narrow.dtype != total.dtype and adds_in_float32(narrow.device, narrow.dtype):
        torch.addmm(total, narrow.T, rows, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(slopes.to(total.dtype).T, rows.to(total.dtype), beta=beta)


@functools.cache
def adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch adds products of this type to float32 here, as it does on GPUs."""
    total, one = torch.zeros(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def _losses_and_slopes(logits: Tensor, index: Tensor, slopes: Tensor) -> Tensor:
    """Return each row's -log softmax at its index `[rows, 1]`, and softmax - onehot in `slopes`.

    `slopes` may be the logits themselves, which makes the head 1.1 times as fast on a CPU: what a
    kernel writes is still in its cache, and no page is new. Otherwise they are widened into it:
    torch's softmax of bfloat16 in float32 would widen them into memory of its own, on GPUs too.

    The largest share of a row is 1 / sum(exp(logit - largest logit)), never below 1 / V: its
    logarithm is exact where that of an unlikely label's own share would be infinite. The one
    kernel of softmax goes over the logits less often than a log-sum-exp and an exponential.
    """
    exact = slopes.dtype
    below_largest = logits.amax(dim=1, keepdim=True).to(exact) - logits.gather(1, index).to(exact)
    if logits.dtype != exact:
        slopes.copy_(logits)
    torch.softmax(slopes, dim=1, out=slopes)
    losses = below_largest - slopes.amax(dim=1, keepdim=True).log()
    slopes.scatter_add_(1, index, torch.full_like(index, -1.0, dtype=exact))
    return losses


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
