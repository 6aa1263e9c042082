"""What computes how positions meet, chosen for the device before the model is built into a run."""

from __future__ import annotations

import torch

from refocused.config.batch_plan import BatchPlan
from refocused.config.model import ModelConfig
from refocused.config.shape import Attention, Mixer, Resonators
from refocused.models.attention import choose_attention
from refocused.models.causal_lm import CausalLM
from refocused.models.ten_choice import choose_scan
from refocused.world import World


def choose_mixing(
    model: CausalLM,
    mixer: Mixer,
    *,
    config: ModelConfig,
    dtype: torch.dtype,
    plan: BatchPlan,
    world: World,
) -> str:
    """Choose what computes how positions meet; all ranks call. Return it, for a person.

    Args:
        model: The model, before its blocks are compiled.
        mixer: How its positions meet.
        config: How it is computed.
        dtype: What the passes compute in.
        plan: The batch.
        world: The ranks.
    """
    if isinstance(mixer, Attention):
        settings = model.network.config
        return choose_attention(
            config.attention,
            batch_shape=(plan.micro, plan.sequence_length),
            heads=settings.num_attention_heads,
            width=settings.hidden_size // settings.num_attention_heads,
            dtype=dtype,
            dropout=config.dropout,
            masked=model.document_id is not None,
            world=world,
        )
    if isinstance(mixer, Resonators):
        return "resonators by FFT"
    return choose_scan(
        model,
        batch_shape=(plan.micro, plan.sequence_length),
        compiles=config.compile != "off",
        world=world,
    )
