"""Small trainings to compare: the same batches with the engine and with a plain loop."""

import dataclasses
import functools
from types import MappingProxyType
from typing import Literal

import pytest
import torch
import transformers
from small_families import VOCABULARY, build

from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import deepspeed_config
from refocused.config.optimization import OptimizerConfig, PrecisionConfig, ZeroConfig
from refocused.engine.build_engine import build_engine
from refocused.models.causal_lm import counted_parameters
from refocused.models.fp8 import compute_in_fp8

STEPS = 6
SAVED_AT = 3
MICRO, ACCUMULATION, RANKS = 2, 2, 2
LENGTH = 32
DOCUMENT = 7  # begins a document, where they are masked
# As in a real start: a rise, so that each step has a rate of its own.
RATES = [1e-3, 2e-3, 3e-3, 3e-3, 2e-3, 1e-3]
OPTIMIZER = OptimizerConfig(lr=3e-3, clip=1.0, weight_decay=0.1)
MUON = OPTIMIZER.model_copy(update={"kind": "muon", "matrix_lr": 1.5e-3, "matrix_decay": 20.0})
# Of GPT-NeoX, whose head is not tied.
SEPARATE = {
    "embedding_lr": 9e-3,
    "embedding_betas": (0.8, 0.99),
    "embedding_decay": 0.01,
    "head_lr": 1.5e-3,
    "head_betas": (0.7, 0.95),
    "head_decay": 1.0,
    "scalar_lr": 6e-3,
    "scalar_betas": (0.85, 0.9),
}
DECAY_SHARES = [1.0, 0.9, 0.7, 0.4, 0.2, 0.0]  # of a schedule
MOMENTA = [0.85, 0.875, 0.9, 0.925, 0.95, 0.95]


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings to train the same model on the same batches.

    Attributes:
        resumes: Save after half of the steps, and make the rest again in a new engine.
        recomputes: Checkpoint the activations.
        fp8: How products of 8 bits are scaled, where they are made.
        undoes_warm_up: Whether the engine takes back DeepSpeed's own first update.
        masked: Keep attention within documents.
        grows: The first three steps have one pass.
        separate: Embedding, head and vectors have settings of their own, and the decay falls.
    """

    stage: Literal[0, 1, 2, 3]
    family: str = "gpt2"
    dtype: Literal["bf16", "fp16", "fp32"] = "fp32"
    offload_optimizer: Literal["none", "cpu"] = "none"
    offload_parameters: Literal["none", "cpu"] = "none"
    partition: Literal["world", "node"] = "world"  # nodes of two ranks
    initial_scale_power: int = 16
    dropout: float = 0.0
    resumes: bool = False
    undoes_warm_up: bool = True
    recomputes: bool = False
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    masked: bool = False
    grows: bool = False
    gradient_accumulation_steps: int = ACCUMULATION
    normuon: bool = False
    separate: bool = False

    @property
    def name(self):
        parts = [self.family, self.dtype, f"zero{self.stage}"]
        for field in dataclasses.fields(self)[3:]:
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(field.name if value is True else f"{field.name}_{value}")
        return "-".join(parts)


def start_engine(
    case,
    world,
    *,
    seed=0,
    prepare=lambda model: None,
    optimizer=OPTIMIZER,
    fragment=MappingProxyType({}),
    replay_every=None,
    **precision_settings,
):
    """Build a case's engine; `prepare` is called with the model first."""
    model = build(
        case.family,
        seed=seed,
        dropout=case.dropout,
        recomputes=case.recomputes,
        document_id=DOCUMENT if case.masked else None,
    )
    if case.fp8 != "none":
        compute_in_fp8(model, block_class=model.block_class, scaling=case.fp8, world=world)
    prepare(model)
    if case.separate:
        optimizer = optimizer.model_copy(update=SEPARATE)
    precision = PrecisionConfig(
        dtype=case.dtype,
        fp8=case.fp8,
        initial_scale_power=case.initial_scale_power,
        **precision_settings,
    )
    accumulation = RANKS * case.gradient_accumulation_steps // world.world_size
    settings = deepspeed_config(
        batch=BatchPlan(MICRO, accumulation, world.world_size, LENGTH),
        optimizer=optimizer,
        precision=precision,
        zero=ZeroConfig(
            stage=case.stage,
            offload_optimizer=case.offload_optimizer,
            offload_parameters=case.offload_parameters,
            partition=case.partition,
        ),
        parameters=counted_parameters(model),
        fragment=fragment,
        ranks_here=2,
    )
    return build_engine(
        model,
        block_class=model.block_class,
        settings=settings,
        optimizer=optimizer,
        precision=precision,
        world=world,
        replay_every=replay_every,
    )


def sequences(steps=STEPS, gradient_accumulation_steps=ACCUMULATION):
    """Tokens `[step, accumulation, rank, micro_batch_size, T + 1]` of sequences that can be
    learned."""
    draw = torch.Generator().manual_seed(7)
    shape = (steps, gradient_accumulation_steps, RANKS, MICRO, LENGTH + 1)
    return torch.randint(4, shape, generator=draw).cumsum(-1) * 7 % VOCABULARY


def make_step(engine, passes, rate=1e-3, *, before_update=lambda losses: None, **others):
    """Make a step of passes `[n, B, T + 1]`; return their losses and the outcome.

    `before_update` is called with the losses, and may return a judge.
    """
    losses = [engine.accumulate(ids[:, :-1], ids[:, 1:]) for ids in passes]
    outcome = engine.update(rate, before_update(losses), **others)
    return [loss.item() for loss in losses], outcome


def saved(engine, world, folder):
    """Save an engine into a new folder."""
    if world.is_rank_0:
        (folder / "ranks").mkdir(parents=True)
    world.barrier()
    written = engine.save_shards(folder)
    assert not written.errors, written.errors
    world.barrier()
    return folder


def tensors_in(folder):
    """Return the bytes of every tensor in the files below a folder."""
    tensors = {}
    for path in sorted(folder.rglob("*.pt")):
        file = torch._C.PyTorchFileReader(str(path))  # zipfile needs the CRC-32 that we omit
        for name in file.get_all_records():
            if name.startswith("data/"):
                tensors[f"{path.relative_to(folder)}/{name}"] = file.get_record(name)
    return tensors


def mean_of_ranks(world, losses):
    return world.total([sum(losses) / len(losses)])[0] / world.world_size


def allow_fp16():
    """Let this process compute in fp16, which DeepSpeed refuses on many CPUs."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True


def by_name(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@dataclasses.dataclass(frozen=True)
class PlainRun:
    """Losses and gradient norms (before clipping) of each step of a plain loop."""

    losses: list[float]
    norms: list[float]


@functools.cache
def train_plainly(family, *, kind="adamw", grows=False, separate=False):
    """Train in float32 with transformers' own model and loss, torch's optimizers and clipping."""
    source = build(family).network
    model = transformers.AutoModelForCausalLM.from_config(source.config)
    model.load_state_dict(source.state_dict())
    matrices = {
        name: p
        for name, p in model.named_parameters()
        if kind == "muon" and p.dim() == 2 and (".h." in name or ".layers." in name)
    }
    roles = {"gpt_neox.embed_in.weight": "embedding", "lm_head.weight": "head"}
    groups, given = [], SEPARATE if separate else {}
    for name, parameter in model.named_parameters():
        role = "scalar" if parameter.dim() == 1 else roles.get(name)
        decay = 0.0 if role == "scalar" else given.get(f"{role}_decay", OPTIMIZER.weight_decay)
        group = {
            "params": [parameter],
            "share": given.get(f"{role}_lr", OPTIMIZER.lr) / OPTIMIZER.lr,
            "betas": given.get(f"{role}_betas", OPTIMIZER.betas),
            "full": decay,
        }
        groups += [] if name in matrices else [group]
    adam = torch.optim.AdamW(
        groups,
        lr=0.0,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        foreach=False,
    )
    optimizers = [adam]
    if matrices:
        muon = torch.optim.Muon(
            matrices.values(), weight_decay=20.0, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    losses, norms = [], []
    for number, step in enumerate(sequences()):
        ids = step[: 1 if grows and number < 3 else ACCUMULATION].reshape(-1, LENGTH + 1)
        loss = model(input_ids=ids, labels=ids).loss
        model.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip).item())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = RATES[number] * group.get("share", 0.5)
                group["momentum"] = MOMENTA[number]
                full = group.get("full", 20.0)
                group["weight_decay"] = full * (DECAY_SHARES[number] if separate else 1.0)
            optimizer.step()
        losses.append(loss.item())
    return PlainRun(losses, norms)
