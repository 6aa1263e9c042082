"""What computes how positions meet and the loss, chosen for the device before training."""

from __future__ import annotations

import torch

from refocused.config.batch_plan import BatchPlan
from refocused.config.model import ModelConfig
from refocused.config.shape import Attention, Mixer, Resonators
from refocused.models.attention import choose_attention
from refocused.models.causal_lm import CausalLM
from refocused.models.head_choice import choose_head
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
    """Choose what computes how positions meet and the loss; return both, for a person.

    All ranks call.

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
        mixing = choose_attention(
            config.attention,
            batch_shape=(plan.micro, plan.sequence_length),
            heads=settings.num_attention_heads,
            width=settings.hidden_size // settings.num_attention_heads,
            dtype=dtype,
            dropout=config.dropout,
            masked=model.document_id is not None,
            world=world,
        )
    elif isinstance(mixer, Resonators):
        mixing = "resonators by FFT"
    else:
        mixing = choose_scan(
            model,
            batch_shape=(plan.micro, plan.sequence_length),
            compiles=config.compile != "off",
            world=world,
        )
    head = choose_head(
        model.network.get_output_embeddings(),
        config.head,
        tokens=plan.micro * plan.sequence_length,
        dtype=dtype,
        world=world,
    )
    return f"{mixing}, {head}"
