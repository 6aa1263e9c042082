"""From a shape to a freshly initialised model, whichever family it is of."""

from __future__ import annotations

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
    """Build a freshly initialised model from transformers' own configuration form.

    Construction is plain, never inside `deepspeed.zero.Init`: there transformers' initialisation
    runs on empty shards and the first loss is far from ln(V).

    Args:
        settings: The JSON of a transformers configuration of a family in `FAMILIES`.
        vocabulary: Rows of the embedding, padding included.
        dropout: Probability at every dropout.
        activation_checkpointing: Recompute each block in the backward pass.
        chunk_tokens: Tokens whose logits exist at once in the loss.
        document_id: Id that begins each document, to attend within documents alone; None: to
            attend across them.

    Raises:
        ConfigError: Another model type, or documents that a recurrence cannot keep apart.
    """
    import transformers

    kind = settings.get("model_type", "")
    if document_id is not None and not (kind in FAMILIES and FAMILIES[kind].is_maskable):
        raise ConfigError(
            f"data.mask_documents: a model of the family {kind!r} carries "
            "what it read from one document into the next. Leave mask_documents out."
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
        # The newer name; with the older one transformers 5.23 prints a warning on every rank.
        newer = getattr(network, "activation_checkpointing_enable", None)
        (newer or network.gradient_checkpointing_enable)({"use_reentrant": False})
        # It also lets the embedding's output need a gradient, for frozen embeddings. In validation
        # that would be true of the first block's input alone, and compile another graph for it.
        network.disable_input_require_grads()
    return CausalLM(network, chunk_tokens=chunk_tokens, document_id=document_id)


def _fuse_activations(network: nn.Module) -> None:
    """Give GPT-2's form of GELU, which transformers writes out in eight operations, one kernel.

    It is the same function, rounded once, and keeps its input for the backward pass in place of
    five tensors of that size. The configuration keeps its name, and with it what is exported.
    """
    from transformers.activations import GELUTanh, NewGELUActivation

    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(parent, name, GELUTanh())


def transformers_config(settings: Mapping[str, Any], *, vocabulary: int, dropout: float) -> Any:
    """Return the configuration object that transformers builds a model from.

    Raises:
        ConfigError: Another model type.
    """
    kind = settings.get("model_type", "")
    if kind not in FAMILIES:
        raise ConfigError(
            f"model_type {kind!r} is not built here; known are {', '.join(FAMILIES)}."
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
    except Exception as error:  # transformers raises nothing narrower for a value of a wrong kind
        raise ConfigError(
            f"transformers take no such {kind}: {' '.join(str(error).split()):.200}. Correct the "
            "model's configuration (model.preset)."
        ) from None
    return config


def register_families() -> None:
    """Make our own families known to transformers' `Auto` classes; safe to call twice."""
    import transformers

    for family in FAMILIES.values():
        if family.module != "transformers":
            config, body, network = map(family.find, ("Config", "Model", "ForCausalLM"))
            transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
            transformers.AutoModel.register(config, body, exist_ok=True)
            transformers.AutoModelForCausalLM.register(config, network, exist_ok=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A model family: where its classes are, and which of its settings are dropouts."""

    prefix: str  # of the names of its classes in `module`
    dropouts: tuple[str, ...]
    module: str = "transformers"
    is_maskable: bool = False  # whether it can leave out earlier documents, as attention alone can

    def find(self, suffix: str) -> Any:
        """Return one of its classes; the module is imported only then."""
        return getattr(importlib.import_module(self.module), self.prefix + suffix)


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family("GPT2", ("resid_pdrop", "embd_pdrop", "attn_pdrop"), is_maskable=True),
    "gpt_neox": Family("GPTNeoX", ("hidden_dropout", "attention_dropout"), is_maskable=True),
    "resonance": Family("Resonance", ("dropout",), "refocused.models.resonance.resonance"),
    "ten": Family("Ten", ("hidden_dropout",), "refocused.models.ten.ten"),
}
