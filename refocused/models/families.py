"""Build an initialized model of any family from a transformers configuration."""

import contextlib
import importlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from refocused.config.model_shape import Family, families
from refocused.config.run_config import ModelConfig
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
    z_loss: float = 0.0,
) -> CausalLM:
    """Build an initialized model.

    Do not call it inside `deepspeed.zero.Init`, where transformers would initialize empty shards.

    Args:
        settings: The JSON of a transformers configuration of one of our families.
        vocabulary: Rows of the embedding, including padding.
        dropout: Probability at every dropout.
        activation_checkpointing: Recompute each block in the backward pass.
        chunk_tokens: Tokens whose logits exist at once in the loss.
        document_id: Id that begins each document, to attend only within documents; None: attend
            across them.
        z_loss: Weight of the z-loss in training.

    Raises:
        ConfigError: An unknown model type, or `document_id` for a recurrent family.
    """
    import transformers
    from transformers.activations import GELUTanh, NewGELUActivation

    kind = settings.get("model_type", "")
    family = families().get(kind)
    if document_id is not None and not (family and family.has_attention):
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
    # torch's GELU is one kernel, transformers' of GPT-2 eight operations. It is the same function,
    # but saves one tensor for the backward pass instead of five. The configuration, and so an
    # export, keeps its name.
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(parent, name, GELUTanh())
    if activation_checkpointing:
        # transformers 5.23 warns about the older name on every rank.
        newer = getattr(network, "activation_checkpointing_enable", None)
        (newer or network.gradient_checkpointing_enable)({"use_reentrant": False})
        # That also makes the embedding's output require a gradient, which in validation would hold
        # only for the first block's input and compile another graph for it.
        network.disable_input_require_grads()
    return CausalLM(network, chunk_tokens=chunk_tokens, document_id=document_id, z_loss=z_loss)


@torch.no_grad()
def initialize(model: CausalLM, choice: ModelConfig, family: Family) -> None:
    """Draw initial weights anew, as far as the run's settings differ from the preset's.

    Every rank draws the same. A memory's queries and keys stay equal (`reads_memory`).
    """
    from transformers.pytorch_utils import Conv1D

    network = model.network
    if choice.embedding_std is not None:
        network.get_input_embeddings().weight.normal_(std=choice.embedding_std)
    if choice.head_std is not None:
        network.get_output_embeddings().weight.normal_(std=choice.head_std)
    for layer in network.base_model.modules() if choice.matrix_init == "fan_in" else ():
        is_linear = isinstance(layer, nn.Linear | Conv1D)
        if is_linear and not getattr(layer, "reads_memory", False):
            inputs = layer.weight.shape[0 if isinstance(layer, Conv1D) else 1]
            limit = math.sqrt(3 / inputs)  # of a uniform distribution with the variance 1 / inputs
            layer.weight.uniform_(-limit, limit)
    for name, parameter in network.base_model.named_parameters() if choice.zero_projections else ():
        if name.endswith(family.projections):
            parameter.zero_()


@contextlib.contextmanager
def shared_weights() -> Iterator[None]:
    """Build models in which equal parameters of equal modules share their memory.

    A model whose weights are replaced once it is partitioned then takes the memory of one block,
    the embedding and the head.
    """
    held: dict[object, Tensor] = {}
    register = nn.Module.register_parameter

    def share(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            key = type(module), name, parameter.shape, parameter.dtype, parameter.device
            parameter.data = held.setdefault(key, parameter.data)
        register(module, name, parameter)

    nn.Module.register_parameter = share  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def transformers_config(settings: Mapping[str, Any], *, vocabulary: int, dropout: float) -> Any:
    """Return the transformers configuration of a model; raise ConfigError if it is invalid."""
    kind = settings.get("model_type", "")
    if kind not in families():
        raise ConfigError(
            f"model_type {kind!r} is not supported. Choose from {', '.join(families())}."
        )
    family = families()[kind]
    # transformers leaves the row of a padding token untrained; there is none here.
    named: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    named |= {**family.defaults, **settings, "vocab_size": vocabulary}
    named |= dict.fromkeys(family.dropouts, dropout)
    del named["model_type"]
    config_class = family_class(family, "Config")
    register_families()
    from transformers.activations import ACT2FN

    try:
        config = config_class(**named)
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

    for family in families().values():
        if family.module != "transformers":
            config, body, network = (
                family_class(family, suffix) for suffix in ("Config", "Model", "ForCausalLM")
            )
            transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
            transformers.AutoModel.register(config, body, exist_ok=True)
            transformers.AutoModelForCausalLM.register(config, network, exist_ok=True)


def family_class(family: Family, suffix: str) -> Any:
    """Import one of a family's classes; raise ConfigError if this transformers lacks it."""
    module, name = importlib.import_module(family.module), family.classes + suffix
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(
            f"transformers {module.__version__} has no {name}. Install a newer transformers, or "
            "choose a model of another family (model.preset)."
        ) from None
