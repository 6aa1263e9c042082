"""Which kernels compute attention: torch's sdpa, causal without a mask, never waiting for a GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from refocused.errors import ConfigError
from refocused.models.timed_trial import fastest_seconds
from refocused.world import World

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


def register_attention() -> str:
    """Make `ATTENTION` known to transformers, and return it.

    It is transformers' own sdpa, without transformers' own mask: to find out whether a row holds
    several documents, that one reads a value from the device in every forward pass, for which the
    host waits until the GPU is idle. A name that no mask is registered for gets the mask that the
    model is given, or none, and then sdpa's causal kernel.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
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


def choose_attention(
    asked: AttentionChoice,
    *,
    batch_shape: tuple[int, int],
    heads: int,
    width: int,
    dtype: torch.dtype,
    dropout: float,
    masked: bool,
    world: World,
) -> str:
    """Let torch's sdpa use one kernel on all ranks; all ranks call. Return which runs, and why.

    On sm90 torch prefers cuDNN to flash whatever is installed; here `auto` times both on rank 0 in
    training's shape. What runs is what torch answers when it is asked, not what was chosen.

    Args:
        asked: `cudnn`, `flash` (FlashAttention-3 where it is installed and fits) or `math`; `auto`:
            the fastest on a GPU, torch's own choice on a CPU.
        batch_shape: Micro-batch, `(B, T)`.
        heads: Of a block.
        width: Of a head.
        dtype: What the passes compute in.
        dropout: Probability of the model's dropouts, which FlashAttention-3 lacks.
        masked: Whether passes give a mask, as for documents, which flash cannot read.
        world: The ranks.

    Raises:
        ConfigError: On every rank: the kernel that was asked for does not run here.
    """
    query = torch.randn(
        (batch_shape[0], heads, batch_shape[1], width),
        dtype=dtype,
        device=world.device,
        requires_grad=True,
    )
    runs = functools.partial(running_kernel, dropout=dropout, masked=masked)
    why = f"model.attention={asked}"
    if asked == "auto" and world.device_kind == "cuda":
        seconds = world.first_does(lambda: _timed(query, dropout=dropout, masked=masked))
        asked = min(seconds, key=lambda kernel: seconds[kernel], default="auto")
        why = ", ".join(f"{kernel} {1e3 * taken:.2f} ms" for kernel, taken in seconds.items())
    if asked == "auto":
        return f"attention by {runs(query)}, torch's choice"
    version = _allow(asked, query, dropout=dropout)
    world.together(lambda: _require(asked, runs(query)))
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
            "here (the device, precision.dtype or the width of a head may be the reason). Set "
            "model.attention=auto."
        )


def _timed(query: Tensor, *, dropout: float, masked: bool) -> dict[AttentionChoice, float]:
    """Return the seconds of a forward and a backward pass by each kernel that runs."""
    seconds: dict[AttentionChoice, float] = {}
    kernels: tuple[AttentionChoice, ...] = ("cudnn", "flash")
    for kernel in kernels:
        _allow(kernel, query, dropout=dropout)
        if running_kernel(query, dropout=dropout, masked=masked) == kernel:
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
