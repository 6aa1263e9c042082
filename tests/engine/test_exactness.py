"""Interrupted twice and resumed equals uninterrupted, bit for bit, under every pair of settings."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from end_to_end.forked import measured
from engine_cases import LENGTH, MICRO, OPTIMIZER, RANKS, SHAPES, VOCABULARY

from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import deepspeed_config
from refocused.config.optimization import PrecisionConfig, ZeroConfig
from refocused.engine.build_engine import build_engine
from refocused.engine.engine import Engine
from refocused.engine.shard_files import seed_everything
from refocused.models.causal_lm import counted_parameters
from refocused.models.families import build_model
from refocused.system.world import World

STEPS = 18
# Not before the tenth: Adam's bias corrections as powers and as running products agree up to there.
SAVED_AT = (12, 15)

Dtype = Literal["bf16", "fp32", "fp16"]
Offload = Literal["none", "optimizer", "all"]


@dataclasses.dataclass(frozen=True)
class ExactnessCase:
    """One way to train; the optimizer always has its two groups, with and without decay."""

    dtype: Dtype
    offload: Offload
    family: str
    dropout: float
    activation_checkpointing: bool
    accumulation: int

    @property
    def name(self) -> str:
        parts = [self.dtype, f"offload {self.offload}", self.family]
        parts += ["dropout"] if self.dropout else []
        parts += ["checkpointed"] if self.activation_checkpointing else []
        return ", ".join([*parts, f"{self.accumulation} passes"])


# Each pair of two settings' values comes together at least once.
EXACTNESS_CASES = [
    ExactnessCase("bf16", "none", "gpt2", 0.2, True, 2),
    ExactnessCase("bf16", "optimizer", "gpt_neox", 0.0, False, 2),
    ExactnessCase("bf16", "all", "gpt2", 0.2, True, 1),
    ExactnessCase("fp32", "none", "gpt_neox", 0.2, False, 1),
    ExactnessCase("fp32", "optimizer", "gpt2", 0.0, True, 1),
    ExactnessCase("fp32", "all", "gpt_neox", 0.2, True, 2),
    ExactnessCase("fp16", "none", "gpt2", 0.0, False, 1),
    ExactnessCase("fp16", "optimizer", "gpt_neox", 0.2, True, 2),
    ExactnessCase("fp16", "all", "gpt2", 0.0, False, 2),
]


def start(case: ExactnessCase, world: World, *, seed: int) -> Engine:
    """Build an engine; its weights and its ranks' random states follow from the seed."""
    torch.manual_seed(seed)
    model = build_model(
        SHAPES[case.family],
        vocabulary=VOCABULARY,
        dropout=case.dropout,
        activation_checkpointing=case.activation_checkpointing,
        chunk_tokens=24,
    )
    # fp16 begins with overflows, and its scale grows again between the saves.
    precision = PrecisionConfig(dtype=case.dtype, initial_scale_power=21, scale_window=4)
    settings = deepspeed_config(
        batch=BatchPlan(MICRO, case.accumulation, world.world_size, LENGTH),
        optimizer=OPTIMIZER,
        precision=precision,
        zero=ZeroConfig(
            stage=3,
            offload_optimizer="none" if case.offload == "none" else "cpu",
            offload_parameters="cpu" if case.offload == "all" else "none",
        ),
        parameters=counted_parameters(model),
        fragment={},
    )
    engine = build_engine(
        model,
        block_class=model.block_class,
        settings=settings,
        optimizer=OPTIMIZER,
        precision=precision,
        world=world,
    )
    seed_everything(seed, rank=world.rank)
    return engine


def train(engine: Engine, case: ExactnessCase, world: World, steps: range) -> list[Any]:
    """Make steps; return for each this rank's losses in hexadecimal and the scale."""
    draw = torch.Generator().manual_seed(7)
    shape = (STEPS, case.accumulation, RANKS, MICRO, LENGTH + 1)
    windows = torch.randint(4, shape, generator=draw).cumsum(-1) * 7 % VOCABULARY
    records: list[Any] = []
    for step in steps:
        passes = windows[step, :, world.rank]
        told = [engine.accumulate(ids[:, :-1], ids[:, 1:]).item().hex() for ids in passes]
        records.append([told, engine.loss_scale(), engine.skipped_steps])
        engine.update(1e-3 * (1 + step % 3))
    return records


def saved(engine: Engine, world: World, folder: Path) -> Path:
    if world.is_rank_0:
        (folder / "ranks").mkdir(parents=True)
    world.barrier()
    written = engine.save_shards(folder)
    assert not written.errors, written.errors
    world.barrier()
    return folder


def digests(world: World, folder: Path) -> dict[str, str]:
    """Return a digest of this rank's optimizer states, and one of its random state."""
    (shard,) = folder.glob(f"zero/*rank_{world.rank}_*optim_states.pt")
    states = torch.load(shard, weights_only=False)["optimizer_state_dict"]
    random = torch.load(folder / f"ranks/rank_{world.rank:05d}.pt", weights_only=True)
    return {"states": _digest(states), "random": _digest(random)}


def _digest(value: Any) -> str:
    found = hashlib.sha256()

    def add(inner: Any) -> None:
        if isinstance(inner, torch.Tensor):
            found.update(f"{inner.dtype} {tuple(inner.shape)}".encode())
            found.update(inner.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(inner, dict):
            for key in sorted(inner, key=str):
                found.update(str(key).encode())
                add(inner[key])
        elif isinstance(inner, list | tuple):
            for one in inner:
                add(one)
        elif isinstance(inner, int | float | str | bytes):
            found.update(repr(inner).encode())

    add(value)
    return found.hexdigest()


def run(case: ExactnessCase, world: World, scratch: Path) -> dict[str, Any]:
    engine = start(case, world, seed=1)
    straight = train(engine, case, world, range(SAVED_AT[0]))
    first = saved(engine, world, scratch / "first")
    straight += train(engine, case, world, range(SAVED_AT[0], STEPS))
    wanted = digests(world, saved(engine, world, scratch / "straight"))
    engine.close()

    engine = start(case, world, seed=98)
    engine.load_shards(first)
    resumed = train(engine, case, world, range(*SAVED_AT))
    second = saved(engine, world, scratch / "second")
    engine.close()
    engine = start(case, world, seed=99)
    engine.load_shards(second)
    resumed += train(engine, case, world, range(SAVED_AT[1], STEPS))
    found = digests(world, saved(engine, world, scratch / "resumed"))
    engine.close()
    return {"straight": straight, "wanted": wanted, "resumed": resumed, "found": found}


def measure(world: World, folder: Path) -> dict[str, Any]:
    """Train every case on this rank, straight and interrupted twice."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    cases = enumerate(EXACTNESS_CASES)
    return {case.name: run(case, world, folder / str(number)) for number, case in cases}


Found = list[dict[str, Any]]  # of each rank, by the case's name


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the ranks measured, all cases in one start."""
    return measured("test_exactness", tmp_path_factory.mktemp("exactness"))[0]


def test_every_pair_of_settings_comes_together() -> None:
    names = [field.name for field in dataclasses.fields(ExactnessCase) if field.name != "family"]
    values = {name: {getattr(case, name) for case in EXACTNESS_CASES} for name in names}
    for one, other in itertools.combinations(names, 2):
        together = {(getattr(case, one), getattr(case, other)) for case in EXACTNESS_CASES}
        assert together == set(itertools.product(values[one], values[other])), (one, other)


@pytest.mark.slow
@pytest.mark.parametrize("case", EXACTNESS_CASES, ids=lambda case: case.name)
def test_two_interruptions_change_no_bit(found: Found, case: ExactnessCase) -> None:
    for rank in found:
        measured = rank[case.name]
        assert measured["resumed"] == measured["straight"][SAVED_AT[0] :]
        assert measured["found"] == measured["wanted"]
    if case.dtype == "fp16":  # both happened, and on both sides of a save
        scales = [scale for _, scale, _ in found[0][case.name]["straight"]]
        skipped = [count for _, _, count in found[0][case.name]["straight"]]
        assert skipped[-1] > 0
        assert max(scales[SAVED_AT[0] :]) > min(scales)


@pytest.mark.slow
@pytest.mark.parametrize("case", EXACTNESS_CASES, ids=lambda case: case.name)
def test_every_rank_has_its_own_random_state_back(found: Found, case: ExactnessCase) -> None:
    first, second = (rank[case.name] for rank in found)
    assert first["found"]["random"] == first["wanted"]["random"]
    assert second["found"]["random"] == second["wanted"]["random"]
    assert first["found"]["random"] != second["found"]["random"]
