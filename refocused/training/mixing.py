"""What computes how positions meet, chosen for the device before the model is built into a run."""

from __future__ import annotations

from refocused.config.batch_plan import BatchPlan
from refocused.config.model import ModelConfig
from refocused.config.shape import Attention, Mixer, Resonators
from refocused.models.attention import use_fastest_attention
from refocused.models.causal_lm import CausalLM
from refocused.models.ten_choice import choose_scan
from refocused.world import World


def choose_mixing(
    model: CausalLM, mixer: Mixer, *, config: ModelConfig, plan: BatchPlan, world: World
) -> str:
    """Choose what computes how positions meet; all ranks call. Return it, for a person.

    Args:
        model: The model, before its blocks are compiled.
        mixer: How its positions meet.
        config: How it is computed.
        plan: The batch.
        world: The ranks.
    """
    if isinstance(mixer, Attention):
        return use_fastest_attention(world.device, dropout=config.dropout)
    if isinstance(mixer, Resonators):
        return "resonators by FFT"
    return choose_scan(
        model,
        batch_shape=(plan.micro, plan.sequence_length),
        compiles=config.compile != "off",
        world=world,
    )
