"""What computes how positions meet and the loss, chosen for the device before training."""

from __future__ import annotations

from typing import Any

import torch

from refocused.config.batch_plan import BatchPlan
from refocused.config.model_shape import Attention, Mixer, Resonators
from refocused.config.run_config import ModelConfig
from refocused.models.causal_lm import CausalLM
from refocused.models.head_choice import choose_head
from refocused.models.kernels import choose_attention, why_dense
from refocused.models.ten.ten_choice import choose_scan
from refocused.system.world import World


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
    mixing = _choose_mixer(model, mixer, config=config, dtype=dtype, plan=plan, world=world)
    head = choose_head(
        model.network.get_output_embeddings(),
        config.head,
        tokens=plan.micro * plan.sequence_length,
        dtype=dtype,
        world=world,
    )
    return f"{mixing}, {head}"


def _choose_mixer(
    model: CausalLM,
    mixer: Mixer,
    *,
    config: ModelConfig,
    dtype: torch.dtype,
    plan: BatchPlan,
    world: World,
) -> str:
    if isinstance(mixer, Attention):
        width = model.network.config.hidden_size // mixer.heads
        query = torch.randn(
            (plan.micro, mixer.heads, plan.sequence_length, width),
            dtype=dtype,
            device=world.device,
            requires_grad=True,
        )
        given: dict[str, Any] = {"dropout": config.dropout, "world": world}
        if model.document_id is None:
            return choose_attention(config.attention, query, masked=False, **given)
        reason = why_dense(config.attention, query, **given)
        if reason is None:
            model.block_shape = (plan.micro, plan.sequence_length)
            return "attention by FlexAttention, within documents by a block mask"
        chosen = choose_attention(config.attention, query, masked=True, **given)
        return f"{chosen}, within documents by a dense mask ({reason})"
    if isinstance(mixer, Resonators):
        return "resonators by FFT"
    return choose_scan(
        model,
        batch_shape=(plan.micro, plan.sequence_length),
        compiles=config.compile != "off",
        world=world,
    )
