"""Choose the kernels of the sequence mixer and of the loss on the run's device."""

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
from refocused.models.timed_trial import fastest_seconds
from refocused.system.errors import ConfigError, short_reason
from refocused.system.world import World

AttentionChoice = Literal["auto", "cudnn", "flash", "math"]
KERNELS = {
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.MATH: "math",
}
FLASH_3_MODULE = "flash_attn_interface"  # of the package of FlashAttention-3
FLASH_3_COMPUTE_CAPABILITY = 9  # Hopper


def choose_kernels(
    model: CausalLM,
    mixer: Mixer,
    *,
    config: ModelConfig,
    dtype: torch.dtype,
    plan: BatchPlan,
    world: World,
) -> str:
    """Choose the kernels before blocks are compiled; return which and why, in words. Collective."""
    batch_shape = (plan.micro, plan.sequence_length)
    if isinstance(mixer, Attention):
        rows, length = batch_shape
        shape = (rows, mixer.heads // config.sequence_parallel, length, mixer.head_width)
        query = torch.randn(shape, dtype=dtype, device=world.device, requires_grad=True)
        given: dict[str, Any] = {"dropout": config.dropout, "world": world}
        given["key_heads"] = mixer.key_heads // config.sequence_parallel
        if model.document_id is None:
            mixing = choose_attention(config.attention, query, masked=False, **given)
        elif (reason := why_dense(config.attention, query, **given)) is None:
            model.block_shape = batch_shape
            mixing = "attention by FlexAttention, within documents by a block mask"
        else:
            chosen = choose_attention(config.attention, query, masked=True, **given)
            mixing = f"{chosen}, within documents by a dense mask ({reason})"
        del query  # not to be held while the head's form is tried
        if plan.sequence_parallel > 1:
            mixing = f"{mixing}, {plan.sequence_parallel} ranks share the tokens of a window"
    else:  # imported only for these families
        said = importlib.import_module("refocused.models.scan_choice").choose_scans(
            model,
            batch_shape=(plan.micro, plan.sequence_length // plan.sequence_parallel),
            dtype=dtype,
            compiles=config.compile != "off",
            world=world,
        )
        mixing = ", ".join(["resonators by FFT"] * isinstance(mixer, Resonators) + said)
    head = choose_head(
        model.network.get_output_embeddings(),
        config.head,
        tokens=math.prod(batch_shape) // plan.sequence_parallel,
        dtype=dtype,
        world=world,
    )
    return f"{mixing}, {head}"


def why_dense(
    asked: AttentionChoice, query: Tensor, *, dropout: float, key_heads: int, world: World
) -> str | None:
    """Return why documents need a dense mask; None: FlexAttention works on all ranks. Collective.

    Each rank tries FlexAttention with `query`, which has training's shape, and `key_heads` keys.
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
            key = query[:, :key_heads]
            output = compiled_within_documents()(query, key, key, blocks)
            torch.autograd.grad(output.sum(), query)
        except Exception as error:  # compilers raise any type
            return f"FlexAttention failed: {short_reason(error)}"
        return None

    return next((reason for reason in world.gather(failure()) if reason), None)


def choose_attention(
    asked: AttentionChoice,
    query: Tensor,
    *,
    dropout: float,
    masked: bool,
    key_heads: int,
    world: World,
) -> str:
    """Set one kernel for torch's sdpa on all ranks; return which and why, in words. Collective.

    On sm90 torch always prefers cuDNN to flash; `auto` times both on rank 0 in training's shape.

    Args:
        asked: `cudnn`, `flash` (FlashAttention-3 if it is installed and suitable), `math`, or
            `auto`: the fastest on a GPU; torch's choice on a CPU, with a mask and in a
            deterministic run.
        query: Of training's shape, `[B, H, T, E]`.
        dropout: Of the model; FlashAttention-3 does not support it.
        masked: Whether passes have a dense mask, which flash does not support on a GPU.
        key_heads: Heads of keys and values.
        world: The ranks.

    Raises:
        ConfigError: On every rank: torch does not use the requested kernel.
    """
    # With a dense mask, transformers repeats shared keys.
    keys = None if masked else key_heads
    runs = functools.partial(running_kernel, dropout=dropout, masked=masked, key_heads=keys)
    why = f"model.attention={asked}"
    # Timings vary between starts, so a deterministic run uses torch's choice.
    is_timed = world.device_kind == "cuda" and not torch.are_deterministic_algorithms_enabled()
    if asked == "auto" and is_timed and not masked:
        seconds = world.on_rank_0(lambda: _timed(query, dropout=dropout, key_heads=key_heads))
        asked = min(seconds, key=lambda kernel: seconds[kernel], default="auto")
        why = ", ".join(f"{kernel} {1e3 * taken:.2f} ms" for kernel, taken in seconds.items())
    if asked == "auto":
        return f"attention by {runs(query)}, torch's choice"
    version = _allow(asked, query, dropout=dropout)
    world.on_all_ranks(lambda: _require(asked, runs(query)))
    name = f"FlashAttention-{version}" if asked == "flash" else asked
    return f"attention by {name} ({why})"


def running_kernel(
    query: Tensor, *, dropout: float, masked: bool = False, key_heads: int | None = None
) -> str:
    """Return the kernel that torch reports it will use for causal attention in this shape."""
    key = query[:, :key_heads]
    mask = query.new_ones((1, 1, *query.shape[2:3] * 2), dtype=torch.bool) if masked else None
    chosen = SDPBackend(
        torch._fused_sdp_choice(
            *(query, key, key, mask, dropout),
            is_causal=not masked,
            enable_gqa=len(key[0]) < len(query[0]),
        )
    )
    return KERNELS.get(chosen, chosen.name.lower())


def flash_version(device: torch.device, *, dropout: float) -> int:
    """Return the FlashAttention version for sdpa: 3 on Hopper without dropout, else 2."""
    if device.type != "cuda" or dropout or importlib.util.find_spec(FLASH_3_MODULE) is None:
        return 2
    return 3 if torch.cuda.get_device_capability(device)[0] == FLASH_3_COMPUTE_CAPABILITY else 2


def _allow(kernel: AttentionChoice, query: Tensor, *, dropout: float) -> int:
    """Enable one kernel, and one that supports masks; return flash's version."""
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
            return 2
    return version


def _require(asked: str, runs: str) -> None:
    if runs != asked:
        raise ConfigError(
            f"model.attention is {asked}, but torch uses {runs} for this model (because of the "
            "device, precision.dtype, the width of a head or data.mask_documents). Set "
            "model.attention=auto."
        )


def _timed(query: Tensor, **given: Any) -> dict[AttentionChoice, float]:
    """Return the seconds of a forward and a backward pass by each supported kernel."""
    seconds: dict[AttentionChoice, float] = {}
    kernels: tuple[AttentionChoice, ...] = ("cudnn", "flash")
    for kernel in kernels:
        _allow(kernel, query, dropout=given["dropout"])
        if running_kernel(query, **given) == kernel:
            with contextlib.suppress(RuntimeError):  # torch's report may be wrong
                seconds[kernel] = pass_seconds(query, **given)
    torch.backends.cuda.enable_cudnn_sdp(True)
    return seconds


def pass_seconds(query: Tensor, *, dropout: float, key_heads: int | None = None) -> float:
    """Return the seconds of a forward and a backward pass on a GPU."""

    def run() -> None:
        key = query[:, :key_heads]
        output = F.scaled_dot_product_attention(
            *(query, key, key),
            dropout_p=dropout,
            is_causal=True,
            enable_gqa=len(key[0]) < len(query[0]),
        )
        torch.autograd.grad(output.sum(), query)

    return fastest_seconds(run, query.device)
