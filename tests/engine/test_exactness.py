"""Interrupted twice and resumed equals uninterrupted, bit for bit, for every pair of settings."""

import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import Case, sequences, start_engine
from ranks import on_ranks

from refocused.engine.engine import Engine
from refocused.system.world import World

STEPS = 18
# Not before the tenth: Adam's bias corrections as powers and as running products agree up to there.
SAVED_AT = (12, 15)


def case_of(
    dtype: Any,
    offload: str,
    family: str,
    dropout: float,
    recomputes: bool,
    gradient_accumulation_steps: int,
) -> Case:
    return Case(
        3,
        family,
        dtype,
        offload_optimizer="none" if offload == "none" else "cpu",
        offload_parameters="cpu" if offload == "all" else "none",
        initial_scale_power=21,  # fp16 begins with overflows
        dropout=dropout,
        recomputes=recomputes,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )


# Each pair of two settings' values occurs at least once, except for families.
SETTINGS: list[tuple[Any, ...]] = [
    ("bf16", "none", "gpt2", 0.2, True, 2),
    ("bf16", "optimizer", "gpt_neox", 0.0, False, 2),
    ("bf16", "all", "gpt2", 0.2, True, 1),
    ("fp32", "none", "gpt_neox", 0.2, False, 1),
    ("fp32", "optimizer", "gpt2", 0.0, True, 1),
    ("fp32", "all", "gpt_neox", 0.2, True, 2),
    ("fp16", "none", "gpt2", 0.0, False, 1),
    ("fp16", "optimizer", "gpt_neox", 0.2, True, 2),
    ("fp16", "all", "gpt2", 0.0, False, 2),
]
EXACTNESS_CASES = [case_of(*settings) for settings in SETTINGS]


def start(case: Case, world: World, *, seed: int) -> Engine:
    """Build an engine; its weights and its ranks' random states follow from the seed."""
    # The scale of fp16 grows again between the saves.
    engine = start_engine(case, world, seed=seed, scale_window=4)
    torch.manual_seed(seed + world.rank)
    return engine


def train(engine: Engine, case: Case, world: World, steps: range) -> list[Any]:
    """Make steps; return for each this rank's losses in hexadecimal and the scale."""
    records: list[Any] = []
    for step in steps:
        passes = sequences(STEPS, case.gradient_accumulation_steps)[step, :, world.rank]
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


def run(case: Case, world: World, scratch: Path) -> dict[str, Any]:
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


def measure(world: World) -> dict[str, Any]:
    """Train every case on this rank, straight and interrupted twice."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    cases = enumerate(EXACTNESS_CASES)
    return {case.name: run(case, world, Path(str(number)).absolute()) for number, case in cases}


Found = list[dict[str, Any]]  # of each rank, by the case's name


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of all cases, from one start of the ranks."""
    return on_ranks(measure, folder=tmp_path_factory.mktemp("exactness"))


def test_every_pair_of_settings_is_covered() -> None:
    columns = [column for place, column in enumerate(zip(*SETTINGS, strict=True)) if place != 2]
    for one, other in itertools.combinations(columns, 2):
        assert {*zip(one, other, strict=True)} == {*itertools.product(one, other)}


@pytest.mark.slow
@pytest.mark.parametrize("case", EXACTNESS_CASES, ids=lambda case: case.name)
def test_two_interruptions_change_no_bit(found: Found, case: Case) -> None:
    for rank in found:
        measured = rank[case.name]
        assert measured["resumed"] == measured["straight"][SAVED_AT[0] :]
        assert measured["found"] == measured["wanted"]
    if case.dtype == "fp16":  # both happened, before and after a save
        scales = [scale for _, scale, _ in found[0][case.name]["straight"]]
        skipped = [count for _, _, count in found[0][case.name]["straight"]]
        assert skipped[-1] > 0
        assert max(scales[SAVED_AT[0] :]) > min(scales)


@pytest.mark.slow
@pytest.mark.parametrize("case", EXACTNESS_CASES, ids=lambda case: case.name)
def test_every_rank_restores_its_random_state(found: Found, case: Case) -> None:
    first, second = (rank[case.name] for rank in found)
    assert first["found"]["random"] == first["wanted"]["random"]
    assert second["found"]["random"] == second["wanted"]["random"]
    assert first["found"]["random"] != second["found"]["random"]
