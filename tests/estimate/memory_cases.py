"""Models and settings whose memory is planned and then counted."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from refocused.config.model_shape import ModelShape, shape_from
from refocused.config.optimization import ZeroConfig

ROWS, CHUNK = 1024, 128
WIDTH, LAYERS = 128, 4

MIXING: dict[str, dict[str, Any]] = {
    "gpt_neox": {"num_attention_heads": 4},
    "resonance": {"num_resonators": 32},
    "ten": {"num_eigenstates": 16, "chunk_size": 32, "scales": [1, 2]},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to compute a step."""

    stage: Literal[0, 1, 2, 3]
    family: Literal["gpt2", "gpt_neox", "resonance", "ten"] = "gpt2"
    dtype: Literal["bf16", "fp32"] = "bf16"
    activation_checkpointing: bool = False
    micro: int = 2
    length: int = 256
    offload: bool = False

    @property
    def zero(self) -> ZeroConfig:
        return ZeroConfig(stage=self.stage, offload_optimizer="cpu" if self.offload else "none")

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))


def shape_of(case: Case) -> ModelShape:
    if case.family == "gpt2":
        settings = {
            "model_type": "gpt2",
            "vocab_size": ROWS,
            "n_positions": case.length,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": 4,
        }
    else:
        settings = {
            "model_type": case.family,
            "vocab_size": ROWS,
            "max_position_embeddings": case.length,
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "intermediate_size": 4 * WIDTH,
            **MIXING[case.family],
        }
    return shape_from(settings, where=case.name)


CASES = [
    *(Case(stage) for stage in (0, 1, 2, 3)),
    Case(3, "gpt_neox"),
    Case(0, "gpt_neox", activation_checkpointing=True, micro=8),
    Case(3, dtype="fp32"),
    *(Case(stage, micro=1, length=32) for stage in (1, 3)),
    *(Case(stage, micro=1, length=32, offload=True) for stage in (1, 2)),
    *(Case(stage, dtype="fp32", micro=1, length=32, offload=True) for stage in (2, 3)),
]
