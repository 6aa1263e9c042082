"""Choose the kernels of a run's sequence mixer and loss on its own device, before training."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from refocused.config.batch_plan import BatchPlan
from refocused.config.model_shape import Attention, Mixer, Resonators
from refocused.config.run_config import ModelConfig
from refocused.models.attention import compiled_within_documents, document_blocks
from refocused.models.causal_lm import CausalLM
from refocused.models.head_choice import choose_head
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
FLASH_3_MODULE = "flash_attn_interface"  # how the package of FlashAttention-3 is imported
FLASH_3_COMPUTE_CAPABILITY = 9  # Hopper


def choose_mixing(
    model: CausalLM,
    mixer: Mixer,
    *,
    config: ModelConfig,
    dtype: torch.dtype,
    plan: BatchPlan,
    world: World,
) -> str:
    """Choose the kernels of sequence mixer and loss before blocks are compiled; all ranks call.

    Returns:
        What runs and why, in words.
    """
    batch_shape = (plan.micro, plan.sequence_length)
    if isinstance(mixer, Attention):
        mixing = _choose_attention(
            model, mixer.heads, batch_shape, config=config, dtype=dtype, world=world
        )
    elif isinstance(mixer, Resonators):
        mixing = "resonators by FFT"
    else:  # by its name: no other family needs it
        mixing = importlib.import_module("refocused.models.ten.ten_choice").choose_scan(
            model, batch_shape=batch_shape, compiles=config.compile != "off", world=world
        )
    head = choose_head(
        model.network.get_output_embeddings(),
        config.head,
        tokens=math.prod(batch_shape),
        dtype=dtype,
        world=world,
    )
    return f"{mixing}, {head}"


def _choose_attention(
    model: CausalLM,
    heads: int,
    batch_shape: tuple[int, int],
    *,
    config: ModelConfig,
    dtype: torch.dtype,
    world: World,
) -> str:
    rows, length = batch_shape
    shape = (rows, heads, length, model.network.config.hidden_size // heads)
    query = torch.randn(shape, dtype=dtype, device=world.device, requires_grad=True)
    given: dict[str, Any] = {"dropout": config.dropout, "world": world}
    if model.document_id is None:
        return choose_attention(config.attention, query, masked=False, **given)
    reason = why_dense(config.attention, query, **given)
    if reason is None:
        model.block_shape = batch_shape
        return "attention by FlexAttention, within documents by a block mask"
    chosen = choose_attention(config.attention, query, masked=True, **given)
    return f"{chosen}, within documents by a dense mask ({reason})"


def why_dense(asked: AttentionChoice, query: Tensor, *, dropout: float, world: World) -> str | None:
    """Return why documents need a dense mask; None: FlexAttention runs. All ranks call.

    Where FlexAttention may run, each rank tries it in training's shape, which `query` has. The
    kernels of `model.attention` but for `auto` are those of sdpa.
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
            output = compiled_within_documents()(query, query, query, blocks)
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
            the fastest on a GPU; torch's own choice on a CPU, with a mask and in a deterministic
            run.
        query: Of training's shape, `[B, H, T, E]`.
        dropout: Of the model, which FlashAttention-3 lacks.
        masked: Whether passes give a dense mask, which flash cannot read on a GPU.
        world: The ranks.

    Raises:
        ConfigError: On every rank: the kernel that was asked for does not run here.
    """
    runs = functools.partial(running_kernel, dropout=dropout, masked=masked)
    why = f"model.attention={asked}"
    # Times differ from start to start, so that a deterministic run takes torch's own choice.
    is_timed = world.device_kind == "cuda" and not torch.are_deterministic_algorithms_enabled()
    if asked == "auto" and is_timed and not masked:
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
