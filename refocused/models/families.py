"""Build an initialized model of any family from a transformers configuration."""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from refocused.models.attention import register_attention
from refocused.models.causal_lm import CausalLM
from refocused.system.errors import ConfigError


def build_model(
    settings: Mapping[str, Any],
    *,
    vocabulary: int,
    dropout: float,
    activation_checkpointing: bool,
    chunk_tokens: int,
    document_id: int | None = None,
) -> CausalLM:
    """Build an initialized model.

    Do not call it inside `deepspeed.zero.Init`, where transformers would initialize empty shards.

    Args:
        settings: The JSON of a transformers configuration of a family in `FAMILIES`.
        vocabulary: Rows of the embedding, including padding.
        dropout: Probability at every dropout.
        activation_checkpointing: Recompute each block in the backward pass.
        chunk_tokens: Tokens whose logits exist at once in the loss.
        document_id: Id that begins each document, to attend only within documents; None: attend
            across them.

    Raises:
        ConfigError: An unknown model type, or `document_id` for a recurrent family.
    """
    import transformers

    kind = settings.get("model_type", "")
    if document_id is not None and not (kind in FAMILIES and FAMILIES[kind].is_maskable):
        raise ConfigError(
            f"data.mask_documents: the recurrent family {kind!r} cannot separate documents. "
            "Remove mask_documents."
        )
    config = transformers_config(settings, vocabulary=vocabulary, dropout=dropout)
    config.use_cache = False
    network = transformers.AutoModelForCausalLM.from_config(
        config,
        attn_implementation=register_attention(),
        dtype=torch.float32,
        trust_remote_code=False,
    )
    _fuse_activations(network)
    if activation_checkpointing:
        # transformers 5.23 warns about the older name on every rank.
        newer = getattr(network, "activation_checkpointing_enable", None)
        (newer or network.gradient_checkpointing_enable)({"use_reentrant": False})
        # That also makes the embedding's output require a gradient, which in validation would hold
        # only for the first block's input and compile another graph for it.
        network.disable_input_require_grads()
    return CausalLM(network, chunk_tokens=chunk_tokens, document_id=document_id)


def _fuse_activations(network: nn.Module) -> None:
    """Replace GPT-2's GELU, eight operations in transformers, by torch's single kernel.

    It is the same function, but saves one tensor for the backward pass instead of five. The
    configuration, and so an export, keeps its name.
    """
    from transformers.activations import GELUTanh, NewGELUActivation

    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(parent, name, GELUTanh())


def transformers_config(settings: Mapping[str, Any], *, vocabulary: int, dropout: float) -> Any:
    """Return the transformers configuration of a model; raise ConfigError if it is invalid."""
    kind = settings.get("model_type", "")
    if kind not in FAMILIES:
        raise ConfigError(
            f"model_type {kind!r} is not supported. Choose from {', '.join(FAMILIES)}."
        )
    named = {key: value for key, value in settings.items() if key != "model_type"}
    named["vocab_size"] = vocabulary
    named = {"bos_token_id": None, "eos_token_id": None} | named
    register_families()
    from transformers.activations import ACT2FN

    try:
        family = FAMILIES[kind]
        config = family.find("Config")(**named | dict.fromkeys(family.dropouts, dropout))
        for name in ("hidden_act", "activation_function"):
            ACT2FN[getattr(config, name, "relu")]
    except Exception as error:  # transformers raises any type
        raise ConfigError(
            f"transformers rejects this {kind} model: {' '.join(str(error).split()):.200}. Correct "
            "the model's configuration (model.preset)."
        ) from None
    return config


def register_families() -> None:
    """Register our own families with transformers' `Auto` classes; idempotent."""
    import transformers

    for family in FAMILIES.values():
        if family.module != "transformers":
            config, body, network = map(family.find, ("Config", "Model", "ForCausalLM"))
            transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
            transformers.AutoModel.register(config, body, exist_ok=True)
            transformers.AutoModelForCausalLM.register(config, network, exist_ok=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A model family: its classes and dropout settings."""

    prefix: str  # of the names of its classes in `module`
    dropouts: tuple[str, ...]  # names of settings
    module: str = "transformers"
    is_maskable: bool = False  # attention can mask earlier documents; a recurrence cannot

    def find(self, suffix: str) -> Any:
        """Import the module, and return one of the family's classes."""
        return getattr(importlib.import_module(self.module), self.prefix + suffix)


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family("GPT2", ("resid_pdrop", "embd_pdrop", "attn_pdrop"), is_maskable=True),
    "gpt_neox": Family("GPTNeoX", ("hidden_dropout", "attention_dropout"), is_maskable=True),
    "resonance": Family("Resonance", ("dropout",), "refocused.models.resonance.resonance"),
    "ten": Family("Ten", ("hidden_dropout",), "refocused.models.ten.ten"),
}
