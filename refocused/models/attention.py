"""Attention as transformers' blocks call it: torch's sdpa, or FlexAttention within documents."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

ATTENTION = "causal_sdpa"
MASK_BLOCK = 128  # queries and keys of a block of FlexAttention's mask, as in torch's own masks
TABLES = tuple(  # of a mask, as torch names them
    f"{part}_{what}"
    for part in ("kv", "full_kv", "q", "full_q")
    for what in ("num_blocks", "indices")
)


def register_attention() -> str:
    """Make `ATTENTION` known to transformers, and return it.

    It is transformers' own sdpa, without transformers' own mask: to find out whether a row holds
    several documents, that one reads a value from the device in every forward pass, for which the
    host waits until the GPU is idle. A name that no mask is registered for gets the mask that the
    model is given, or none, and then sdpa's causal kernel. A model that is given `document_blocks`
    passes them on to each block, where FlexAttention reads them.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        document_blocks: tuple[Tensor, ...] | None = None,
        scaling: float | None = None,
        **named: Any,
    ) -> tuple[Tensor, None]:
        if document_blocks is not None:
            is_outermost = query.is_cuda and not torch.compiler.is_compiling()
            within = compiled_within_documents() if is_outermost else within_documents
            output = within(query, key, value, document_blocks, scaling)
            return output.transpose(1, 2).contiguous(), None
        given = (module, query, key, value, attention_mask)
        attended: tuple[Tensor, None] = sdpa_attention_forward(*given, scaling=scaling, **named)
        return attended

    AttentionInterface.register(ATTENTION, attend)
    return ATTENTION


def document_mask(input_ids: Tensor, *, document_id: int) -> Tensor:
    """Return which of the tokens `[B, T]` may see which: earlier ones of its document.

    The result is `[B, 1, T, T]` (query, key); `document_id` begins each document.
    """
    length = input_ids.shape[1]
    document = (input_ids == document_id).cumsum(dim=1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
    return (same & causal).unsqueeze(1)


def document_blocks(positions: Tensor) -> tuple[Tensor, ...]:
    """Return the mask of `document_mask` for FlexAttention, made without waiting for the device.

    A block is `MASK_BLOCK` queries by as many keys. A query sees the keys from the first one of its
    document, which never decreases along a row, to its own; so a block of queries sees a range of
    blocks of keys, and all of those behind the start of the last query's document and before its
    own place. A last block with fewer queries sees none whole, as in torch's own masks.

    Args:
        positions: Each token's place in its document, `[B, T]`.

    Returns:
        The place where each token's document begins, `[B, T]`; then counts `[B, 1, N]` and indices
        `[B, 1, N, N]` of the blocks of keys that a block of queries sees in part, of those that it
        sees whole, and both again of the blocks of queries that see a block of keys.
    """
    length = positions.shape[1]
    begins = torch.arange(length, device=positions.device) - positions
    blocks = torch.arange(-(-length // MASK_BLOCK), device=positions.device)
    ends = (blocks + 1) * MASK_BLOCK
    last = begins[:, ends.clamp(max=length) - 1, None]  # where the last query's document begins
    seen = (begins[:, ::MASK_BLOCK, None] < ends) & (blocks <= blocks[:, None])
    whole = (last <= blocks * MASK_BLOCK) & (blocks < blocks[:, None]) & (ends <= length)[:, None]
    in_part = seen & ~whole
    tables: list[Tensor] = []
    for these in (in_part, whole, in_part.mT.contiguous(), whole.mT.contiguous()):
        tables += [these.sum(-1), these.int().argsort(dim=-1, descending=True, stable=True)]
    return begins, *(table.int().unsqueeze(1) for table in tables)


def within_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_blocks: tuple[Tensor, ...],
    scale: float | None = None,
) -> Tensor:
    """Return the causal attention `[B, H, T, E]` within documents, by FlexAttention.

    The queries, keys and values have the shape of the output; `document_blocks` is what the
    function of that name returns. `scale` is of the scores; None: one over the root of E.
    """
    begins, *rest = document_blocks
    tables: dict[str, Any] = dict(zip(TABLES, rest, strict=True))
    length = query.shape[2]

    def sees(row: Tensor, head: Tensor, at: Tensor, other: Tensor) -> Tensor:
        return (begins[row, at] <= other) & (other <= at)

    sizes = (MASK_BLOCK, MASK_BLOCK)
    mask = BlockMask((length, length), BLOCK_SIZE=sizes, mask_mod=sees, **tables)
    output: Tensor = flex_attention(query, key, value, block_mask=mask, scale=scale)
    return output


@functools.cache
def compiled_within_documents() -> Any:
    """Compile the kernel for blocks that run as written; compiled ones have it in their graph."""
    return torch.compile(within_documents, dynamic=False)
