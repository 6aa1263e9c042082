"""The language-model head: mean cross-entropy or label scores, without holding all logits."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refocused.system.errors import ConfigError

HeadForm = Literal["chunked", "fused", "kernel"]
IGNORED_LABEL = -100
CAPPED_COLUMNS = 4096  # of a chunk's logits, copied at once to differentiate their cap


@dataclasses.dataclass(frozen=True, slots=True)
class LogitTerms:
    """What a loss does to logits beyond cross-entropy.

    With a `softcap` c, logits x become c tanh(x / c) (Gemma Team 2024). `z_loss` z adds the
    gradient of z log(sum(exp(logits)))^2, which keeps that sum near 1 (Chowdhery et al. 2022, PaLM,
    5); the loss itself stays the cross-entropy, so that losses compare.
    """

    softcap: float | None = None
    z_loss: float = 0.0

    def cap(self, logits: Tensor) -> Tensor:
        """Return the capped logits, in float32 at least: 16 bits would round them three times."""
        if self.softcap is None:
            return logits
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return exact.div(self.softcap).tanh_() * self.softcap


PLAIN = LogitTerms()
# Logits, labels, output for the gradient, terms.
RowLosses = Callable[[Tensor, Tensor, Tensor, LogitTerms], Tensor]


class LossHead(nn.Linear):
    """A linear head that returns logits, or the loss if labels are given.

    The loss is computed here because under ZeRO-3 the weight is gathered only while its own module
    runs. Each chunk of tokens is also differentiated at once, so that the largest temporary is
    `[chunk, V]`.
    """

    form: HeadForm = "chunked"  # see `head_loss`
    vocabulary: int | None = None  # rows that count in the loss; None: padding rows, too

    def __init__(
        self, weight: nn.Parameter, *, chunk_tokens: int, terms: LogitTerms = PLAIN
    ) -> None:
        """Use a weight `[V, D]`, which may be tied to the embedding."""
        vocabulary, width = weight.shape
        super().__init__(width, vocabulary, bias=False, device="meta")
        self.weight = weight
        self.chunk_tokens, self.terms = chunk_tokens, terms

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, *, of_each: bool = False
    ) -> Tensor:
        """Return logits `[..., V]`, or the mean loss over labels that are not -100.

        The logits are not capped, as transformers' models do that after their head.

        Args:
            hidden: Hidden states `[..., D]`.
            labels: Ids of the next tokens (already shifted), `[...]`.
            of_each: Return the loss of each label instead, `[...]`, without a gradient; 0 for -100.
        """
        if labels is None:
            return super().forward(hidden)
        weight: Tensor = self.weight
        if torch.is_autocast_enabled(hidden.device.type):  # does not reach the products below
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        loss = head_loss(
            self.form,
            hidden.flatten(0, -2),
            weight,
            labels.flatten(),
            chunk=self.chunk_tokens,
            vocabulary=self.vocabulary,
            terms=self.terms,
            of_each=of_each,
        )
        return loss.view(labels.shape) if of_each else loss


def head_loss(
    form: HeadForm,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int,
    vocabulary: int | None = None,
    terms: LogitTerms = PLAIN,
    of_each: bool = False,
) -> Tensor:
    """Return the mean cross-entropy of `hidden @ weight.T` over labels that are not -100.

    Rows of the weight from `vocabulary` on have probability 0; None: all rows count. With `of_each`
    return the loss of each label, 0 for -100, without a gradient.

    `chunked` and `kernel` are ours: torch operations, or one Triton kernel, for each chunk. `fused`
    is torch's own; it has no `terms`, and `of_each` is that of `chunked`. Raises ConfigError if it
    is missing, as in torch 2.11.
    """
    if form == "fused" and not of_each:
        if not hasattr(nn, "LinearCrossEntropyOptions"):
            raise ConfigError(
                f"model.head=fused: torch {torch.__version__} has none. Set model.head=chunked."
            )
        if terms != PLAIN:
            raise ValueError("it has neither a logit softcap nor a z-loss")
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        weight = weight[:vocabulary]
        # Its own mean is NaN without labels, and its gradients underflow in fp16.
        total = F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)
        return total / (labels != IGNORED_LABEL).sum().clamp(min=1)
    row_losses: RowLosses = _losses_and_gradients
    if form == "kernel":  # loaded only here, since it needs Triton
        row_losses = importlib.import_module("refocused.models.head_kernel").kernel_losses
    loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        *(hidden, weight, labels, chunk, torch.is_grad_enabled() and not of_each, row_losses),
        *(vocabulary, terms, of_each),
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T`, differentiated chunk by chunk.

    d loss / d logits = (softmax(logits) - onehot(label)) / number of labels. The division and the
    incoming gradient (with fp16's loss scale) are applied in the backward pass, so that 16-bit
    products have factors near one and do not underflow.
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
        vocabulary: int | None,
        terms: LogitTerms,
        of_each: bool,
    ) -> Tensor:
        counted = labels != IGNORED_LABEL
        count = counted.sum().clamp(min=1)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        each = torch.zeros(len(hidden), dtype=exact, device=hidden.device) if of_each else None
        hidden_gradient = torch.empty_like(hidden) if wants_gradient else None
        weight_gradient = torch.empty_like(weight, dtype=exact) if wants_gradient else None
        room = hidden.new_empty(min(chunk, len(hidden)), len(weight))
        # The gradients of capped logits depend on the logits, which torch operations must then
        # keep.
        in_place = row_losses is not _losses_and_gradients or (
            exact == room.dtype and terms.softcap is None
        )
        room_of_gradients = room if in_place else torch.empty_like(room, dtype=exact)
        for start in range(0, max(1, len(hidden)), chunk):
            part = slice(start, start + chunk)
            rows, mask = hidden[part], counted[part].unsqueeze(1)
            logits = torch.mm(rows, weight.T, out=room[: len(rows)])
            if vocabulary is not None:
                logits[:, vocabulary:] = -torch.inf
            index = labels[part].unsqueeze(1).where(mask, 0)
            gradients = room_of_gradients[: len(rows)]
            losses = row_losses(logits, index, gradients, terms).where(mask, 0.0)
            total += losses.sum()
            if each is not None:
                each[part] = losses[:, 0]
            if hidden_gradient is not None and weight_gradient is not None:
                narrow = gradients if gradients.dtype == logits.dtype else logits.copy_(gradients)
                # Rows without a label are masked in the [chunk, D] tensors, not in the gradients.
                torch.mm(narrow, weight, out=hidden_gradient[part]).mul_(mask)
                beta = 0 if start == 0 else 1  # 0 overwrites uninitialized memory
                rows, total_type = rows * mask, weight_gradient.dtype
                # Neither form has a temporary of the weight's size.
                if narrow.dtype != total_type and adds_in_float32(narrow.device, narrow.dtype):
                    out = weight_gradient
                    torch.addmm(out, narrow.T, rows, out_dtype=total_type, beta=beta, out=out)
                else:
                    products = gradients.to(total_type).T, rows.to(total_type)
                    weight_gradient.addmm_(*products, beta=beta)
        if wants_gradient:
            ctx.save_for_backward(hidden_gradient, weight_gradient, count)
            ctx.weight_dtype = weight.dtype
        return total / count if each is None else each

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient, count = ctx.saved_tensors
        factor = gradient / count
        # In place: another tensor of the weight's size would raise the step's peak memory.
        return (
            hidden_gradient.mul_(factor),
            weight_gradient.mul_(factor).to(ctx.weight_dtype),
            *(None,) * 7,
        )


@functools.cache
def adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch supports adding products of this type to float32, as it does on GPUs."""
    total, one = torch.zeros(16, 16, device=device), torch.ones(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def _losses_and_gradients(
    logits: Tensor, index: Tensor, gradients: Tensor, terms: LogitTerms = PLAIN
) -> Tensor:
    """Return each row's -log softmax at its label `[rows, 1]`; write the gradients.

    The cap is computed in the type of the gradients. They may be the logits themselves if these are
    not capped, which makes the head 1.1 times as
    fast on a CPU (cache, no new pages). Otherwise the logits are copied into it, because torch's
    softmax of bfloat16 in float32 would allocate that copy.

    The largest probability of a row is 1 / sum(exp(logit - largest logit)) >= 1 / V, so its
    logarithm is accurate where that of an unlikely label would be infinite. One softmax reads the
    logits less often than a log-sum-exp and an exponential.
    """
    exact, softcap, capped = gradients.dtype, terms.softcap, logits
    if softcap is not None:
        padding = logits[:1].isneginf().any(dim=0)  # rows beyond the vocabulary have no logit
        capped = gradients.copy_(logits).div_(softcap).tanh_().mul_(softcap)
        capped.masked_fill_(padding, -torch.inf)
    largest = capped.amax(dim=1, keepdim=True).to(exact)
    below_largest = largest - capped.gather(1, index).to(exact)
    if capped.data_ptr() != gradients.data_ptr():
        gradients.copy_(capped)
    torch.softmax(gradients, dim=1, out=gradients)
    above_largest = -gradients.amax(dim=1, keepdim=True).log()
    losses = below_largest + above_largest
    if terms.z_loss:  # d z L^2 / d logits = 2 z L softmax, with L the log-sum-exp
        gradients.mul_(1 + 2 * terms.z_loss * (largest + above_largest))
    gradients.scatter_add_(1, index, torch.full_like(index, -1.0, dtype=exact))
    if softcap is not None:  # d capped / d logit = 1 - tanh^2, of some columns at a time
        columns = (torch.split(matrix, CAPPED_COLUMNS, dim=1) for matrix in (gradients, logits))
        for part, raw in zip(*columns, strict=True):
            part.addcmul_(part, raw.to(exact).div_(softcap).tanh_().square_(), value=-1)
    return losses


def label_scores(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    vocabulary: int,
    rows_at_once: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each sequence's sum of log-probabilities `[B]` and of labels not ranked first `[B]`.

    Args:
        logits_of: The head: hidden states `[N, D]` to logits `[N, at least vocabulary]`.
        hidden: Final hidden states `[B, T, D]`.
        labels: The next tokens `[B, T]`, already shifted; -100 is not counted.
        vocabulary: Number of ids, without padding.
        rows_at_once: Labels whose logits exist at once; None: all. Under ZeRO-3 a call of the head
            is collective, so all ranks must make the same number of calls.
    """
    counted = labels != IGNORED_LABEL
    states, targets = hidden[counted], labels[counted]
    step = rows_at_once or max(1, len(targets))
    scores = []
    for first in range(0, max(1, len(targets)), step):
        part, ids = states[first : first + step], targets[first : first + step]
        exact = logits_of(part)[:, :vocabulary].float()
        logits = exact.gather(1, ids.unsqueeze(1)).squeeze(1)
        scores.append((logits - exact.logsumexp(dim=1), exact.argmax(dim=1) != ids))
    rows = counted.nonzero()[:, 0]
    empty = torch.zeros(len(labels), dtype=torch.float64, device=labels.device)
    log_probabilities = torch.cat([sums for sums, _ in scores]).double()
    misses = torch.cat([missed for _, missed in scores]).double()
    return empty.index_add(0, rows, log_probabilities), empty.index_add(0, rows, misses)
