"""Models and settings whose memory and work are planned and then counted."""

import dataclasses
from typing import Any, Literal

import torch

from refocused.config.load_run import LoadedRun, load_run
from refocused.config.model_shape import ModelShape, shape_from
from refocused.config.optimization import ZeroConfig
from refocused.models.causal_lm import CausalLM
from refocused.models.families import build_model

ROWS, CHUNK = 1024, 128
WIDTH, LAYERS = 128, 4

MIXING: dict[str, dict[str, Any]] = {
    "gpt_neox": {"num_attention_heads": 4},
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "nanochat": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "resonance": {"num_resonators": 32},
    "ten": {"num_eigenstates": 16, "chunk_size": 32, "scales": [1, 2]},
}
FAMILIES = ("gpt2", *MIXING)
# Of the recurrent families.
RECALL: dict[str, dict[str, Any]] = {
    "": {},
    "convolution": {"convolution_width": 4},
    "memory": {"convolution_width": 4, "memory_heads": 4},
    "hybrid": {"convolution_width": 4, "attention_every": 2, "attention_heads": 4},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to compute a step."""

    stage: Literal[0, 1, 2, 3]
    family: str = "gpt2"
    dtype: Literal["bf16", "fp32"] = "bf16"
    activation_checkpointing: bool = False
    micro_batch_size: int = 2
    length: int = 256
    offload: bool = False
    recall: Literal["", "convolution", "memory", "hybrid"] = ""
    optimizer: Literal["adamw", "muon", "normuon"] = "adamw"

    @property
    def kind(self) -> Literal["adamw", "muon"]:
        return "adamw" if self.optimizer == "adamw" else "muon"

    @property
    def zero(self) -> ZeroConfig:
        return ZeroConfig(stage=self.stage, offload_optimizer="cpu" if self.offload else "none")

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))

    @property
    def numbers(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    def run(self, *, masked: bool = False, **model: Any) -> LoadedRun:
        """The run whose plan is compared with what is counted, with changes to its model."""
        settings = {
            "model.sequence_length": self.length,
            "model.activation_checkpointing": self.activation_checkpointing,
            "model.head_chunk_tokens": CHUNK,
            "data.mask_documents": masked,
            "data.document_id": 7,
            "precision.dtype": self.dtype,
            "optimizer.kind": self.kind,
            **{f"model.{name}": value for name, value in model.items()},
        }
        words = [f"{name}={str(value).lower()}" for name, value in settings.items()]
        return dataclasses.replace(load_run("gpt2_124m", words), shape=self.shape())

    def shape(self, *, layers: int = LAYERS) -> ModelShape:
        if self.family == "gpt2":
            settings = {"n_positions": self.length, "n_embd": WIDTH, "n_layer": layers, "n_head": 4}
        else:
            settings = {
                "max_position_embeddings": self.length,
                "hidden_size": WIDTH,
                "num_hidden_layers": layers,
                "intermediate_size": 4 * WIDTH,
                **MIXING[self.family],
                **RECALL[self.recall],
            }
        settings = {"model_type": self.family, "vocab_size": ROWS, **settings}
        return shape_from(settings, where=self.name)

    def built(self, *, layers: int = LAYERS, document_id: int | None = None) -> CausalLM:
        return build_model(
            self.shape(layers=layers).settings,
            vocabulary=ROWS,
            dropout=0.0,
            activation_checkpointing=self.activation_checkpointing,
            chunk_tokens=CHUNK,
            document_id=document_id,
        )

    def ids(self) -> torch.Tensor:
        return torch.randint(ROWS, (self.micro_batch_size, self.length))


CASES = [
    *(Case(stage) for stage in (0, 1, 2, 3)),
    Case(3, "gpt_neox"),
    Case(0, "gpt_neox", activation_checkpointing=True, micro_batch_size=8),
    Case(3, dtype="fp32"),
    *(Case(stage, micro_batch_size=1, length=32) for stage in (1, 3)),
    *(Case(stage, micro_batch_size=1, length=32, offload=True) for stage in (1, 2)),
    *(Case(stage, dtype="fp32", micro_batch_size=1, length=32, offload=True) for stage in (2, 3)),
    *(Case(stage, micro_batch_size=1, length=32, optimizer="muon") for stage in (0, 1, 2, 3)),
    *(Case(stage, "gpt_neox", "fp32", optimizer="muon") for stage in (0, 2)),
    *(
        Case(stage, "llama", micro_batch_size=1, length=32, optimizer="normuon")
        for stage in (0, 1, 2, 3)
    ),
]
