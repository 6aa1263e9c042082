"""Which kernels compute attention: torch's sdpa, causal without a mask, never waiting for a GPU."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

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


def use_fastest_attention(device: torch.device, *, dropout: float) -> str:
    """Let sdpa use FlashAttention-3 where it is installed and the GPU is a Hopper; say what runs.

    Nothing is downloaded. torch replaces the kernel behind sdpa, so that models and compiled
    blocks need not know.

    Args:
        device: What the model runs on.
        dropout: Probability of the model's dropouts, which FlashAttention-3 lacks.
    """
    if device.type != "cuda":
        return "sdpa"
    fits = torch.cuda.get_device_capability(device)[0] == FLASH_3_COMPUTE_CAPABILITY
    if not fits or dropout or importlib.util.find_spec(FLASH_3_MODULE) is None:
        return "sdpa (FlashAttention-2)"
    try:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        return f"sdpa (FlashAttention-2; FlashAttention-3 is installed but unusable: {reason})"
    return "sdpa (FlashAttention-3)"
