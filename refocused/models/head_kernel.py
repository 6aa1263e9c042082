"""Losses and gradients of a chunk of logits as a Triton kernel: two reads, one write.

torch needs seven kernels, and a float32 copy of 16-bit logits. Tested in Triton's interpreter but
not yet on a GPU, so `model.head` has to name it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from refocused.models.head_loss import PLAIN, LogitTerms

BLOCK = 4096  # logits of a row in registers at once
WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _row_losses(  # type: ignore[no-untyped-def]
    logits, labels, losses, gradients, columns, softcap, z_loss,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Write -log softmax at a row's label, and softmax - onehot, which may overwrite the logits."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -1e38, tl.float32)  # finite, or lanes beyond the row become NaN
    total = tl.zeros((BLOCK,), tl.float32)
    own = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + lane
        part = tl.load(logits + row * columns + at, mask=at < columns, other=float("-inf"))
        part = part.to(tl.float32)
        if HAS_CAP:
            bent = 2.0 * tl.sigmoid(2.0 * part / softcap) - 1.0  # tanh(logit / softcap)
            part = tl.where(part > float("-inf"), softcap * bent, part)
        higher = tl.maximum(largest, part)
        total = total * tl.exp(largest - higher) + tl.exp(part - higher)
        largest = higher
        own += tl.where(at == label, part, 0.0)
    # These reductions also synchronize the threads, so that none overwrites a logit before another
    # has read it.
    row_largest = tl.max(largest)
    row_total = tl.sum(total * tl.exp(largest - row_largest))
    tl.store(losses + row, tl.log(row_total) + (row_largest - tl.sum(own)))
    pull = 1.0 + 2.0 * z_loss * (tl.log(row_total) + row_largest)
    for start in range(0, columns, BLOCK):
        at = start + lane
        part = tl.load(logits + row * columns + at, mask=at < columns, other=float("-inf"))
        part = part.to(tl.float32)
        gradient = tl.full((BLOCK,), 1.0, tl.float32)
        if HAS_CAP:
            bent = 2.0 * tl.sigmoid(2.0 * part / softcap) - 1.0
            gradient = 1.0 - bent * bent
            part = tl.where(part > float("-inf"), softcap * bent, part)
        share = pull * tl.exp(part - row_largest) / row_total
        share = (share - tl.where(at == label, 1.0, 0.0)) * gradient
        tl.store(gradients + row * columns + at, share, mask=at < columns)


def kernel_losses(
    logits: Tensor, index: Tensor, gradients: Tensor, terms: LogitTerms = PLAIN
) -> Tensor:
    """Return each row's -log softmax at its label `[rows, 1]`; write its gradient to `gradients`.

    Args:
        logits: `[rows, V]`, contiguous.
        index: Labels `[rows, 1]`, in range.
        gradients: Output, d loss / d logits = softmax - onehot; may be the logits themselves.
        terms: Softcap and z-loss.
    """
    losses = torch.empty(index.shape, dtype=torch.float32, device=logits.device)
    if len(logits):
        _row_losses[(len(logits),)](
            *(logits, index, losses, gradients, logits.shape[1]),
            *(terms.softcap or 1.0, terms.z_loss),
            **{"HAS_CAP": terms.softcap is not None, "BLOCK": BLOCK, "num_warps": WARPS},
        )
    return losses
