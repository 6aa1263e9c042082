"""Small checkpoints saved by real ranks with DeepSpeed, with their engines' weights."""

import dataclasses
import json
from typing import Any, Literal

import small_families
import torch
from ranks import on_ranks
from torch import Tensor

LENGTH, ROWS, VOCABULARY = 16, 128, 101
# Widths that neither 2 nor 4 ranks divide evenly, so that every kind of padding is there.
WIDTHS: dict[str, Any] = {"vocab_size": VOCABULARY, "num_attention_heads": 3, "hidden_size": 30}
WIDTHS |= {"max_position_embeddings": 33, "intermediate_size": 75}
GROUPED = WIDTHS | {"num_key_value_heads": 1}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": 33, "n_embd": 30, "n_head": 3, "n_inner": 75}


def rope(kind, base, **others):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **others}}


SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": small_families.SHAPES["gpt2"] | GPT2,
    "gpt_neox": small_families.SHAPES["gpt_neox"]
    | WIDTHS
    | rope("default", 50000.0, partial_rotary_factor=0.4),
}
LATER = {
    "llama": GROUPED | {"tie_word_embeddings": True} | rope("linear", 20000.0, factor=4.0),
    "qwen3": GROUPED | {"head_dim": 14} | rope("default", 1e6),
    "nanochat": GROUPED,
}
LATER = {name: small_families.SHAPES[name] | shape for name, shape in LATER.items()}


@dataclasses.dataclass(frozen=True)
class Save:
    """Settings of a saved small model.

    Attributes:
        sub_group_size: Elements at which stage 3 cuts its flat groups.
        frozen: Whether the embedding of positions is not trained.
    """

    stage: Literal[0, 1, 2, 3]
    family: str = "gpt2"
    dtype: Literal["bf16", "fp16", "fp32"] = "fp32"
    offload: Literal["none", "cpu"] = "none"
    sub_group_size: int | None = None
    frozen: bool = False

    @property
    def shape(self):
        return (SHAPES | LATER)[self.family]

    @property
    def name(self):
        extras = [self.offload] * (self.offload != "none") + ["frozen"] * self.frozen
        extras += [f"groups{self.sub_group_size}"] * (self.sub_group_size is not None)
        return "-".join([self.family, f"zero{self.stage}", self.dtype, *extras])


# fp32, bf16 and fp16 in turn: every stage has each of them on some number of ranks.
PLAIN = {
    ranks: [
        Save(stage, family, ("fp32", "bf16", "fp16")[(stage + number + turn) % 3])
        for number, family in enumerate(SHAPES)
        for stage in (0, 1, 2, 3)
    ]
    for turn, ranks in enumerate((1, 2, 4))
}
SPECIAL = [
    Save(2, "gpt_neox", "bf16", offload="cpu"),
    Save(3, "gpt2", "bf16", offload="cpu"),
    Save(3, "gpt2", "bf16", sub_group_size=2000),
    Save(3, "gpt2", "bf16", frozen=True),
    Save(2, "gpt2", "fp32", frozen=True),
    *(Save(3, family, "bf16") for family in LATER),
]
SAVES = {1: PLAIN[1], 2: [*PLAIN[2], *SPECIAL], 4: PLAIN[4]}


def save_steps(folder, saves, *, ranks):
    """Save a checkpoint for each, in one start of the ranks."""
    on_ranks(save_all, folder, saves, folder=folder, ranks=ranks)


def step_of(folder, save):
    return folder / save.name / "checkpoints" / "checkpoint_step_2"


def weights_of(folder, save):
    """The engine's own float32 weights, gathered by DeepSpeed."""
    weights: dict[str, Tensor] = torch.load(folder / save.name / "weights.pt", weights_only=True)
    return weights


def save_all(world, folder, saves):
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    for save in saves:
        _save(folder / save.name, save, world)


def _save(folder, save, world):
    from refocused.checkpoints.step.checkpointer import Checkpointer
    from refocused.models.causal_lm import counted_parameters
    from refocused.models.families import build_model

    torch.manual_seed(0)
    model = build_model(
        save.shape, vocabulary=ROWS, dropout=0.0, activation_checkpointing=False, chunk_tokens=24
    )
    if save.frozen:
        model.network.base_model.wpe.weight.requires_grad = False
    parameters = counted_parameters(model)
    engine = _engine(save, model, world)
    draw = torch.Generator().manual_seed(world.rank)
    for _ in range(2):
        ids = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=draw)
        engine.accumulate(ids[:, :-1], ids[:, 1:])
        engine.update(1e-2)
    metadata = _metadata(save, parameters)
    checkpointer = Checkpointer(folder / "checkpoints", world=world, metadata=metadata)
    checkpointer.save(engine, _TRAINER, files_done=0)
    gathered = _gathered(engine, save)
    if world.is_rank_0:
        torch.save(gathered, folder / "weights.pt")
    engine.close()


def _engine(save, model, world):
    from refocused.config.batch_plan import BatchPlan
    from refocused.config.deepspeed import deepspeed_config
    from refocused.config.optimization import OptimizerConfig, PrecisionConfig, ZeroConfig
    from refocused.engine.build_engine import build_engine

    common: dict[str, Any] = {
        "optimizer": OptimizerConfig(lr=1e-2),
        "precision": PrecisionConfig(dtype=save.dtype, initial_scale_power=8),
    }
    settings = deepspeed_config(
        batch=BatchPlan(2, 1, world.world_size, LENGTH),
        zero=ZeroConfig(stage=save.stage, offload_optimizer=save.offload),
        parameters=20_000,
        fragment={},
        **common,
    )
    if save.sub_group_size is not None:
        settings["zero_optimization"]["sub_group_size"] = save.sub_group_size
    return build_engine(
        model, block_class=model.block_class, settings=settings, world=world, **common
    )


def _gathered(engine, save):
    """Return the full float32 masters by transformers' names."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    inner = engine._engine
    masters = {}
    if save.stage == 0 and save.dtype != "fp32":
        groups = zip(inner.optimizer.fp16_groups, inner.optimizer.fp32_groups, strict=True)
        for halves, copies in groups:
            masters |= {id(half): copy for half, copy in zip(halves, copies, strict=True)}
    found = {}
    for name, parameter in inner.module.named_parameters():
        if save.stage == 0:
            whole = masters.get(id(parameter), parameter)
        elif parameter.requires_grad:
            whole = safe_get_full_fp32_param(parameter)
        else:
            with GatheredParameters([parameter], enabled=save.stage == 3):
                whole = parameter.detach().clone()
        found[name.removeprefix("network.")] = whole.detach().float().clone()
    return found


_TRAINER: dict[str, Any] = {
    "step": 2,
    "tokens": 2048,
    "position": {"epoch": 0, "sequences": 8},
    "loss": 4.5,
    "validation_loss": 4.25,
    "bits_per_byte": 1.5,
    "validation_step": 2,
    "validation_set": "held out",
    "best_loss": 4.25,
    "best_step": 2,
    "seconds": 3600.0,
    "cost_usd": 2.5,
}


def _metadata(save, parameters):
    from refocused.checkpoints.step.checkpoint_manifest import RunMetadata

    settings = {"model": {"sequence_length": LENGTH}, "data": {"tokenizer": "unknown"}}
    return RunMetadata(
        run="sample",
        zero_stage=save.stage,
        dtype=save.dtype,
        versions={"deepspeed": "0.19.8"},
        data_fingerprint="f00d",
        data_order="seed 1",
        parameters=parameters,
        run_yaml=json.dumps(settings),
        model_json=json.dumps(save.shape),
    )
