"""Trains every case by Muon on this rank: straight, interrupted, and on another number of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from engine_cases import OPTIMIZER, RANKS, RATES, SAVED_AT, Case, start_engine, windows

from refocused.engine.engine import Engine
from refocused.system.world import World

MUON = OPTIMIZER.model_copy(update={"kind": "muon"})
MUON_CASES = [
    *(Case(stage) for stage in (0, 1, 2, 3)),
    *(Case(stage, "gpt_neox", "bf16") for stage in (0, 1, 3)),
]
BEFORE, AFTER = range(SAVED_AT), range(SAVED_AT, len(RATES))


def train(engine: Engine, world: World, steps: range) -> list[float]:
    """Make steps, of the same windows on one rank as on two; return their losses."""
    losses = []
    for step in steps:
        own = windows()[step][:, world.rank :: world.world_size].flatten(0, 1)
        micro = [engine.accumulate(ids[:, :-1], ids[:, 1:]).item() for ids in own]
        verdict = engine.update(RATES[step])
        assert verdict.was_made()
        losses.append(world.total([sum(micro) / len(micro)])[0] / world.world_size)
    return losses


def run(case: Case, world: World, folder: Path) -> dict[str, Any]:
    engine = start_engine(case, world, optimizer=MUON)
    losses = train(engine, world, BEFORE)
    if world.is_rank_0:
        (folder / "ranks").mkdir(parents=True)
    world.barrier()
    written = engine.save_shards(folder)
    assert not written.errors, written.errors
    losses += train(engine, world, AFTER)
    engine.close()
    world.barrier()
    engine = start_engine(case, world, seed=99, optimizer=MUON)
    engine.load_shards(folder)
    resumed = train(engine, world, AFTER)
    engine.close()
    return {"losses": losses, "resumed": resumed, "resharded": resume_anew(case, world, folder)}


def resume_anew(case: Case, world: World, folder: Path) -> list[float]:
    """Resume what two ranks saved on this number of them; return the losses of the last steps."""
    if case.stage == 0:
        return []
    engine = start_engine(case, world, seed=98, optimizer=MUON)
    engine.load_resharded(folder, ranks=RANKS)
    losses = train(engine, world, AFTER)
    engine.close()
    return losses


def measure(world: World, folder: Path) -> dict[str, Any]:
    """Save on two ranks; on one, resume what they saved, stages 1 to 3 in turns."""
    if world.world_size == RANKS:
        return {case.name: run(case, world, folder / case.name) for case in MUON_CASES}
    found = {}
    for case in MUON_CASES:
        other = dataclasses.replace(case, stage=case.stage % 3 + 1 if case.stage else 0)
        found[case.name] = resume_anew(other, world, folder / case.name)
    return found
