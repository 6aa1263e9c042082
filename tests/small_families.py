"""One small shape of each family, and random tokens for it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from refocused.config.model_shape import families
from refocused.models.causal_lm import CausalLM
from refocused.models.families import build_model

VOCABULARY = 512
COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
}
GROUPED = {**COMMON, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_positions": 64,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        **COMMON,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    },
    "llama": {"model_type": "llama", **GROUPED},
    "qwen3": {"model_type": "qwen3", **GROUPED, "head_dim": 32},
    "nanochat": {"model_type": "nanochat", **GROUPED},
    "resonance": {"model_type": "resonance", **COMMON, "num_resonators": 8},
    "ten": {"model_type": "ten", **COMMON, "num_eigenstates": 8, "scales": [1, 2], "chunk_size": 8},
}
RECALL: dict[str, Any] = {"convolution_width": 4, "memory_heads": 4}  # of resonance and TEN
HYBRID = RECALL | {"attention_every": 2, "attention_heads": 4}
every_family = pytest.mark.parametrize("family", list(SHAPES))
WITH_ATTENTION = [name for name in SHAPES if families()[name].has_attention]
where_attention_is = pytest.mark.parametrize("family", WITH_ATTENTION)


def build(
    family: str,
    *,
    seed: int = 0,
    dropout: float = 0.0,
    recomputes: bool = False,
    vocabulary: int = VOCABULARY,
    document_id: int | None = None,
    **changes: Any,
) -> CausalLM:
    torch.manual_seed(seed)
    return build_model(
        SHAPES[family] | changes,
        vocabulary=vocabulary,
        dropout=dropout,
        activation_checkpointing=recomputes,
        chunk_tokens=24,
        document_id=document_id,
    )


def tokens(rows: int = 4, length: int = 64, *, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value."""
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())
