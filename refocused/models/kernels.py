"""Which kernels compute attention: torch's sdpa, or FlexAttention where documents are masked."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from refocused.models.timed_trial import fastest_seconds, short_reason
from refocused.system.errors import ConfigError
from refocused.system.world import World

AttentionChoice = Literal["auto", "cudnn", "flash", "math"]
KERNELS = {
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.MATH: "math",
}

ATTENTION = "causal_sdpa"
FLASH_3_MODULE = "flash_attn_interface"  # how the package of FlashAttention-3 is imported
FLASH_3_COMPUTE_CAPABILITY = 9  # Hopper
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
            within = _compiled_within_documents() if is_outermost else within_documents
            output = within(query, key, value, document_blocks, scaling)
            return output.transpose(1, 2).contiguous(), None
        given = (module, query, key, value, attention_mask)
        attended: tuple[Tensor, None] = sdpa_attention_forward(*given, scaling=scaling, **named)
        return attended

    AttentionInterface.register(ATTENTION, attend)
    return ATTENTION


def document_mask(input_ids: Tensor, *, document_id: int) -> Tensor:
    """Return which token `[B, 1, T, T]` (query, key) may see which: earlier ones of its document.

    Args:
        input_ids: Tokens `[B, T]`.
        document_id: Id that begins each document.
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

    Args:
        query: Of the shape of the output, as are `key` and `value`.
        key: What the queries look at.
        value: What they take.
        document_blocks: What `document_blocks` returns.
        scale: Of the scores; None: one over the root of E.
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
def _compiled_within_documents() -> Any:
    """Compile the kernel for blocks that run as written; compiled ones have it in their graph."""
    return torch.compile(within_documents, dynamic=False)


def why_dense(asked: AttentionChoice, query: Tensor, *, dropout: float, world: World) -> str | None:
    """Return why documents need a dense mask; None: FlexAttention runs. All ranks call.

    Where FlexAttention may run, each rank tries it in training's shape.

    Args:
        asked: `model.attention`, whose kernels but for `auto` are those of sdpa.
        query: Of training's shape.
        dropout: Probability of the model's dropouts.
        world: The ranks.
    """
    if world.device_kind != "cuda":
        return "FlexAttention does not train on a CPU"
    if asked != "auto":
        return f"model.attention={asked}"
    if dropout:
        return "FlexAttention has no dropout"

    def failure() -> str | None:
        try:
            rows, _, length, _ = query.shape
            blocks = document_blocks(torch.arange(length, device=query.device).expand(rows, -1))
            output = _compiled_within_documents()(query, query, query, blocks)
            torch.autograd.grad(output.sum(), query)
        except Exception as error:  # a compiler fails with anything
            return f"FlexAttention failed: {short_reason(error)}"
        return None

    return next((reason for reason in world.gather(failure()) if reason), None)


def choose_attention(
    asked: AttentionChoice, query: Tensor, *, dropout: float, masked: bool, world: World
) -> str:
    """Let torch's sdpa use one kernel on all ranks; all ranks call. Return which runs, and why.

    On sm90 torch prefers cuDNN to flash whatever is installed; here `auto` times both on rank 0 in
    training's shape. What runs is what torch answers when it is asked, not what was chosen.

    Args:
        asked: `cudnn`, `flash` (FlashAttention-3 where it is installed and fits) or `math`; `auto`:
            the fastest on a GPU, torch's own choice on a CPU and with a mask.
        query: Of training's shape, `[B, H, T, E]`.
        dropout: Probability of the model's dropouts, which FlashAttention-3 lacks.
        masked: Whether passes give a dense mask, which flash cannot read on a GPU.
        world: The ranks.

    Raises:
        ConfigError: On every rank: the kernel that was asked for does not run here.
    """
    runs = functools.partial(running_kernel, dropout=dropout, masked=masked)
    why = f"model.attention={asked}"
    if asked == "auto" and world.device_kind == "cuda" and not masked:
        seconds = world.on_rank_0(lambda: _timed(query, dropout=dropout))
        asked = min(seconds, key=lambda kernel: seconds[kernel], default="auto")
        why = ", ".join(f"{kernel} {1e3 * taken:.2f} ms" for kernel, taken in seconds.items())
    if asked == "auto":
        return f"attention by {runs(query)}, torch's choice"
    version = _allow(asked, query, dropout=dropout)
    world.on_all_ranks(lambda: _require(asked, runs(query)))
    name = f"FlashAttention-{version}" if asked == "flash" else asked
    return f"attention by {name} ({why})"


def running_kernel(query: Tensor, *, dropout: float, masked: bool = False) -> str:
    """Return which kernel torch takes for causal attention in this shape, by its own answer."""
    mask = query.new_ones((1, 1, *query.shape[2:3] * 2), dtype=torch.bool) if masked else None
    chosen = SDPBackend(
        torch._fused_sdp_choice(query, query, query, mask, dropout, is_causal=not masked)
    )
    return KERNELS.get(chosen, chosen.name.lower())


def flash_version(device: torch.device, *, dropout: float) -> int:
    """Return which FlashAttention is to stand behind sdpa: 3 is for Hopper, without dropout."""
    if device.type != "cuda" or dropout or importlib.util.find_spec(FLASH_3_MODULE) is None:
        return 2
    return 3 if torch.cuda.get_device_capability(device)[0] == FLASH_3_COMPUTE_CAPABILITY else 2


def _allow(kernel: AttentionChoice, query: Tensor, *, dropout: float) -> int:
    """Let torch take one kernel, and for masks what can read them; return flash's version."""
    cuda = torch.backends.cuda
    cuda.enable_cudnn_sdp(kernel == "cudnn")
    cuda.enable_flash_sdp(kernel == "flash")
    cuda.enable_mem_efficient_sdp(kernel != "math")
    version = flash_version(query.device, dropout=dropout)
    if kernel == "flash" and version == 3:
        try:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")
        except (ImportError, RuntimeError, ValueError):
            return 2  # the name that is printed says so
    return version


def _require(asked: str, runs: str) -> None:
    if runs != asked:
        raise ConfigError(
            f"model.attention is {asked}, but torch computes this model's attention by {runs} "
            "here (the device, precision.dtype, the width of a head or data.mask_documents may be "
            "the reason). Set model.attention=auto."
        )


def _timed(query: Tensor, *, dropout: float) -> dict[AttentionChoice, float]:
    """Return the seconds of a forward and a backward pass by each kernel that runs."""
    seconds: dict[AttentionChoice, float] = {}
    kernels: tuple[AttentionChoice, ...] = ("cudnn", "flash")
    for kernel in kernels:
        _allow(kernel, query, dropout=dropout)
        if running_kernel(query, dropout=dropout) == kernel:
            with contextlib.suppress(RuntimeError):  # torch says that it runs, and it does not
                seconds[kernel] = pass_seconds(query, dropout=dropout)
    torch.backends.cuda.enable_cudnn_sdp(True)
    return seconds


def pass_seconds(query: Tensor, *, dropout: float) -> float:
    """Return the seconds of a forward and a backward pass on a GPU."""

    def run() -> None:
        output = F.scaled_dot_product_attention(
            query, query, query, dropout_p=dropout, is_causal=True
        )
        torch.autograd.grad(output.sum(), query)

    return fastest_seconds(run, query.device)
