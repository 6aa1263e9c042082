"""Attention for transformers' blocks: torch's sdpa, or FlexAttention within documents."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from refocused.models.sequence_parallel import SequenceGroup

ATTENTION = "causal_sdpa"
MASK_BLOCK = 128  # size of a block of FlexAttention's mask; torch's default
TABLES = tuple(  # torch's names of the tables of a mask
    f"{part}_{what}"
    for part in ("kv", "full_kv", "q", "full_q")
    for what in ("num_blocks", "indices")
)


def register_attention() -> str:
    """Register `ATTENTION` with transformers, and return it.

    This is transformers' sdpa without its mask creation, which reads a value from the device in
    every forward pass and so stalls the host. For a name without a registered mask function,
    transformers passes on the given mask, or none (sdpa's causal kernel). `document_blocks` given
    to the model reach each block, where FlexAttention uses them, and so does a `sequence_group`,
    whose ranks have slices of the tokens.
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
        sequence_group: SequenceGroup | None = None,
        scaling: float | None = None,
        **named: Any,
    ) -> tuple[Tensor, None]:
        if sequence_group is not None:
            query, key, value = sequence_group.heads_of_all_tokens(query, key, value)
        if document_blocks is not None:
            is_outermost = query.is_cuda and not torch.compiler.is_compiling()
            within = compiled_within_documents() if is_outermost else within_documents
            output = within(query, key, value, document_blocks, scaling)
            output = output.transpose(1, 2).contiguous()
        else:
            given = (module, query, key, value, attention_mask)
            output, _ = sdpa_attention_forward(*given, scaling=scaling, **named)
        if sequence_group is not None:
            output = sequence_group.tokens_of_all_heads(output)
        return output, None

    AttentionInterface.register(ATTENTION, attend)
    return ATTENTION


def document_mask(input_ids: Tensor, *, document_id: int) -> Tensor:
    """Return the causal mask within documents, `[B, 1, T, T]` (query, key), of tokens `[B, T]`.

    `document_id` begins each document.
    """
    length = input_ids.shape[1]
    document = (input_ids == document_id).cumsum(dim=1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
    return (same & causal).unsqueeze(1)


def document_blocks(positions: Tensor) -> tuple[Tensor, ...]:
    """Return the mask of `document_mask` for FlexAttention, without a host synchronization.

    A block is `MASK_BLOCK` queries by as many keys. A query attends to the keys from the start of
    its document, which never decreases along a row, to itself; so a block of queries attends to a
    range of key blocks, and fully to those between the start of the last query's document and the
    block itself. An incomplete last block attends fully to none, as in torch's own masks.

    Args:
        positions: Each token's position in its document, `[B, T]`.

    Returns:
        The start of each token's document, `[B, T]`; then counts `[B, 1, N]` and indices
        `[B, 1, N, N]` of the key blocks that a query block sees in part, of those that it sees
        fully, and both again of the query blocks that see a key block.
    """
    length = positions.shape[1]
    begins = torch.arange(length, device=positions.device) - positions
    blocks = torch.arange(-(-length // MASK_BLOCK), device=positions.device)
    ends = (blocks + 1) * MASK_BLOCK
    last = begins[:, ends.clamp(max=length) - 1, None]  # start of the last query's document
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

    Queries have the shape of the output, keys and values may have fewer heads; `document_blocks` is
    the result of the function of that name. `scale` multiplies the scores; default 1 / sqrt(E).
    """
    begins, *rest = document_blocks
    tables: dict[str, Any] = dict(zip(TABLES, rest, strict=True))
    length = query.shape[2]

    def sees(row: Tensor, head: Tensor, at: Tensor, other: Tensor) -> Tensor:
        return (begins[row, at] <= other) & (other <= at)

    sizes = (MASK_BLOCK, MASK_BLOCK)
    mask = BlockMask((length, length), BLOCK_SIZE=sizes, mask_mod=sees, **tables)
    output: Tensor = flex_attention(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output


@functools.cache
def compiled_within_documents() -> Any:
    """Compile the kernel, for blocks that are not compiled themselves."""
    return torch.compile(within_documents, dynamic=False)
