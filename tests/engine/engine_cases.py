"""Small trainings to compare: the same batches through the engine and through a plain loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
import transformers
from torch import Tensor

from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import deepspeed_config
from refocused.config.optimization import OptimizerConfig, PrecisionConfig, ZeroConfig
from refocused.engine.build_engine import build_engine
from refocused.engine.engine import Engine
from refocused.models.causal_lm import CausalLM, counted_parameters
from refocused.models.families import build_model
from refocused.models.fp8 import compute_in_fp8
from refocused.system.world import World

STEPS = 6
SAVED_AT = 3
DESCRIBED_AT = (0, 4)
MICRO, ACCUMULATION, RANKS = 2, 2, 2
LENGTH, VOCABULARY = 32, 512
DOCUMENT = 7  # begins a document, where they are masked
# As in a real start: a rise, so that each step has a rate of its own.
RATES = [1e-3, 2e-3, 3e-3, 3e-3, 2e-3, 1e-3]
OPTIMIZER = OptimizerConfig(lr=3e-3, clip=1.0, weight_decay=0.1)

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
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    },
    "resonance": {
        "model_type": "resonance",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_resonators": 8,
    },
    "ten": {
        "model_type": "ten",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_eigenstates": 8,
        "scales": [1, 2],
        "chunk_size": 8,
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train the same model on the same batches.

    Attributes:
        resumes: Save after half of the steps, and make the rest again in a new engine.
        recomputes: Checkpoint the activations.
        fp8: How products of 8 bits are scaled, where they are made.
        undoes_warm_up: Whether the engine takes back DeepSpeed's own first update.
        masked: Keep attention within documents.
    """

    stage: Literal[0, 1, 2, 3]
    family: str = "gpt2"
    dtype: Literal["bf16", "fp16", "fp32"] = "fp32"
    offload_optimizer: Literal["none", "cpu"] = "none"
    offload_parameters: Literal["none", "cpu"] = "none"
    initial_scale_power: int = 16
    dropout: float = 0.0
    resumes: bool = False
    undoes_warm_up: bool = True
    recomputes: bool = False
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    masked: bool = False

    @property
    def name(self) -> str:
        parts = [self.family, self.dtype, f"zero{self.stage}"]
        if self.offload_optimizer != "none":
            parts.append("offload")
        if self.offload_parameters != "none":
            parts.append("all")
        if self.initial_scale_power != 16:
            parts.append(f"scale{self.initial_scale_power}")
        if self.dropout:
            parts.append("dropout")
        if self.recomputes:
            parts.append("recomputed")
        if self.fp8 != "none":
            parts.append(self.fp8)
        if self.masked:
            parts.append("masked")
        if not self.undoes_warm_up:
            parts.append("warmed")
        return "-".join(parts)


EXACT = [
    *(Case(stage, family) for family in ("gpt2", "gpt_neox") for stage in (0, 1, 2, 3)),
    *(Case(stage, "resonance") for stage in (0, 3)),
    *(Case(stage, "ten") for stage in (0, 3)),
    Case(1, offload_optimizer="cpu"),
    Case(2, offload_optimizer="cpu"),
    Case(3, offload_optimizer="cpu"),
    Case(3, "gpt_neox", offload_optimizer="cpu", offload_parameters="cpu"),
]
HALF = [
    *(Case(stage, dtype="bf16", resumes=True) for stage in (0, 1, 2, 3)),
    Case(1, "gpt_neox", "bf16"),
    Case(3, "gpt_neox", "bf16"),
    Case(3, "resonance", "bf16"),
    Case(1, dtype="bf16", offload_optimizer="cpu", resumes=True),
    Case(3, dtype="bf16", offload_optimizer="cpu", offload_parameters="cpu", resumes=True),
    *(Case(stage, dtype="fp16") for stage in (0, 1, 2, 3)),
]
WARMED = Case(0, dtype="bf16", undoes_warm_up=False)
OVERFLOWING = [
    Case(stage, dtype="fp16", initial_scale_power=20, resumes=True) for stage in (0, 1, 3)
]
LOOKING = [Case(stage, family, dropout=0.5) for stage, family in ((0, "gpt2"), (3, "gpt_neox"))]
REFUSING = [
    *(Case(stage) for stage in (0, 1, 2, 3)),
    *(Case(stage, dtype="bf16") for stage in (0, 1, 3)),
    Case(1, dtype="fp16"),
    Case(3, offload_optimizer="cpu"),
]
DROPPING = Case(3, dropout=0.2, resumes=True)
CASES = [*EXACT, *HALF, WARMED, DROPPING, *OVERFLOWING]


def fresh_model(
    family: str,
    *,
    seed: int = 0,
    dropout: float = 0.0,
    recomputes: bool = False,
    document_id: int | None = None,
) -> CausalLM:
    torch.manual_seed(seed)
    return build_model(
        SHAPES[family],
        vocabulary=VOCABULARY,
        dropout=dropout,
        activation_checkpointing=recomputes,
        chunk_tokens=24,
        document_id=document_id,
    )


def start_engine(
    case: Case,
    world: World,
    *,
    seed: int = 0,
    prepare: Callable[[CausalLM], None] = lambda model: None,
    optimizer: OptimizerConfig = OPTIMIZER,
    fragment: Mapping[str, Any] = MappingProxyType({}),
) -> Engine:
    """Build a case's engine; `prepare` is called with the model first."""
    model = fresh_model(
        case.family,
        seed=seed,
        dropout=case.dropout,
        recomputes=case.recomputes,
        document_id=DOCUMENT if case.masked else None,
    )
    if case.fp8 != "none":
        compute_in_fp8(model, block_class=model.block_class, scaling=case.fp8, world=world)
    prepare(model)
    precision = PrecisionConfig(
        dtype=case.dtype, fp8=case.fp8, initial_scale_power=case.initial_scale_power
    )
    settings = deepspeed_config(
        batch=BatchPlan(MICRO, RANKS * ACCUMULATION // world.world_size, world.world_size, LENGTH),
        optimizer=optimizer,
        precision=precision,
        zero=ZeroConfig(
            stage=case.stage,
            offload_optimizer=case.offload_optimizer,
            offload_parameters=case.offload_parameters,
        ),
        parameters=counted_parameters(model),
        fragment=fragment,
    )
    return build_engine(
        model,
        block_class=model.block_class,
        settings=settings,
        optimizer=optimizer,
        precision=precision,
        world=world,
    )


def windows() -> Tensor:
    """Tokens `[step, accumulation, rank, micro, T + 1]` of sequences that can be learned."""
    draw = torch.Generator().manual_seed(7)
    shape = (STEPS, ACCUMULATION, RANKS, MICRO, LENGTH + 1)
    return torch.randint(4, shape, generator=draw).cumsum(-1) * 7 % VOCABULARY


@dataclasses.dataclass(frozen=True)
class PlainRun:
    """What a plain loop measured: losses and gradient norms (before clipping) of each step."""

    losses: list[float]
    norms: list[float]


def train_plainly(family: str) -> PlainRun:
    """Train in float32 with transformers' own model and loss, torch's AdamW and clipping."""
    source = fresh_model(family).network
    model = transformers.AutoModelForCausalLM.from_config(source.config)
    model.load_state_dict(source.state_dict())
    decaying = [p for name, p in model.named_parameters() if p.dim() >= 2]
    others = [p for name, p in model.named_parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decaying}, {"params": others, "weight_decay": 0.0}],
        lr=0.0,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        foreach=False,
    )
    losses, norms = [], []
    for rate, step in zip(RATES, windows(), strict=True):
        ids = step.reshape(-1, LENGTH + 1)
        loss = model(input_ids=ids, labels=ids).loss
        adam.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip).item())
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        losses.append(loss.item())
    return PlainRun(losses, norms)
