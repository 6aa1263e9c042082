"""Runs that look for flipped bits compute the same as others, and find what is flipped."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bit_flips import CASES, STEP, flip_bits
from engine_cases import LENGTH, MICRO, MUON, OPTIMIZER, RATES, Case, sequences, start_engine
from ranks import on_ranks

from refocused.engine.bit_checks import digest
from refocused.engine.compiled import compile_blocks
from refocused.engine.engine import Engine
from refocused.models.causal_lm import CausalLM
from refocused.system.world import World

EQUAL = [
    *(Case(stage, dropout=0.2) for stage in (0, 1, 2, 3)),
    *(Case(stage, dtype="bf16", dropout=0.2) for stage in (0, 1, 3)),
    Case(3, dtype="fp16", dropout=0.2, initial_scale_power=21),  # begins with overflows
    Case(3, "gpt_neox", "bf16", dropout=0.2, recomputes=True),
    Case(3, offload_optimizer="cpu", offload_parameters="cpu", dropout=0.2),
    Case(3, "nanochat", gradient_accumulation_steps=1),
    Case(2, normuon=True),  # by Muon
    Case(3, "resonance"),
]
COMPILED = [Case(stage, dtype="bf16", dropout=0.2) for stage in (1, 3)]
FLIPS_OF_A_CASE = 2


def start(case: Case, world: World, *, replay_every: int | None) -> Engine:
    """Build an engine, with compiled blocks in the cases that are."""

    def compile_(model: CausalLM) -> None:
        found = compile_blocks(
            model,
            block_class=model.block_class,
            batch_shape=(MICRO, LENGTH),
            dtype=case.dtype,
            choice="on",
            world=world,
            is_partitioned=case.stage == 3,
            backend="aot_eager",
        )
        assert found.is_on, found.text

    engine = start_engine(
        case,
        world,
        prepare=compile_ if case in COMPILED else lambda model: None,
        optimizer=MUON if case.normuon else OPTIMIZER,
        replay_every=replay_every,
    )
    torch.manual_seed(5 + world.rank)
    return engine


def train(case: Case, world: World, *, replay_every: int | None) -> list[Any]:
    """Make all steps; return the bits of losses and norms, and the random states."""
    engine = start(case, world, replay_every=replay_every)
    records: list[Any] = []
    for step, rate in enumerate(RATES[:4]):
        passes = sequences(gradient_accumulation_steps=case.gradient_accumulation_steps)[
            step, :, world.rank
        ]
        losses = [engine.accumulate(ids[:, :-1], ids[:, 1:]).item().hex() for ids in passes]
        outcome = engine.update(rate)
        outcome.explain(step)
        records.append([losses, str(engine.gradient_norm()), outcome.was_finite()])
    engine.close()
    return [*records, torch.rand(1).item()]


def measure(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {"flips": flip_bits(world, FLIPS_OF_A_CASE)}
    for case in [*EQUAL, *COMPILED]:
        found[case.name] = [train(case, world, replay_every=every) for every in (None, 2)]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    return on_ranks(measure, folder=tmp_path_factory.mktemp("checks"))


def test_a_digest_changes_with_any_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randint(256, (n,), generator=draw).byte() for n in (300_003, 5, 0, 1)]
    whole = digest(parts)
    assert torch.equal(whole, digest([one.clone() for one in parts]))
    for part, place in ((0, 0), (0, 262_144), (0, 300_002), (1, 4), (3, 0)):
        for bit in range(8):
            parts[part][place] ^= 1 << bit
            assert not torch.equal(whole, digest(parts))
            parts[part][place] ^= 1 << bit


@pytest.mark.slow
@pytest.mark.parametrize("case", [*EQUAL, *COMPILED], ids=lambda case: case.name)
def test_checks_change_no_bit_of_a_training(found: list[dict[str, Any]], case: Case) -> None:
    for rank in found:
        plain, checked = rank[case.name]
        assert checked == plain


def check_flips(told: list[list[Any]], *, flips: int) -> None:
    """Each flip was found, on its rank and as its kind, before the update of its step."""
    assert len(told) == flips
    for kind, rank, good, error in told:
        assert good == ""
        what = f"two passes of one micro-batch differ at step {STEP + 1}"
        if kind == "state":
            what = f"weights or optimizer state changed after the update of step {STEP}"
        assert re.match(rf"False: Silent corruption: {what} on rank {rank} \(CPU of", error)
        assert f"rank {1 - rank}" not in error


@pytest.mark.slow
def test_flips_are_found_on_every_rank_alike(found: list[dict[str, Any]]) -> None:
    first, second = found
    check_flips(first["flips"], flips=FLIPS_OF_A_CASE * len(CASES))
    assert first["flips"] == second["flips"]


@pytest.mark.long
def test_a_hundred_of_a_hundred_flips_are_found(tmp_path: Path) -> None:
    first, second = on_ranks(flip_bits, 25, folder=tmp_path, timeout=600)
    assert [kind for kind, *_ in first].count("pass") == 50
    check_flips(first, flips=100)
    assert first == second
