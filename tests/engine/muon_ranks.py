"""Trains every case by Muon on this rank, straight and interrupted."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine_cases import RATES, SAVED_AT, Case, join_ready, start_engine, windows
from muon_cases import MUON, MUON_CASES

from refocused.engine.engine import Engine
from refocused.world import World


def train(engine: Engine, world: World, steps: range) -> list[float]:
    losses = []
    for step in steps:
        micro = [
            engine.accumulate(ids[world.rank, :, :-1], ids[world.rank, :, 1:]).item()
            for ids in windows()[step]
        ]
        verdict = engine.update(RATES[step])
        assert verdict.was_made()
        losses.append(world.total([sum(micro) / len(micro)])[0] / world.world_size)
    return losses


def run(case: Case, world: World, folder: Path) -> dict[str, Any]:
    engine = start_engine(case, world, optimizer=MUON)
    losses = train(engine, world, range(SAVED_AT))
    if world.is_first:
        (folder / "ranks").mkdir(parents=True)
    world.barrier()
    written = engine.save_shards(folder)
    assert not written.errors, written.errors
    losses += train(engine, world, range(SAVED_AT, len(RATES)))
    engine.close()
    world.barrier()
    engine = start_engine(case, world, seed=99, optimizer=MUON)
    engine.load_shards(folder)
    resumed = train(engine, world, range(SAVED_AT, len(RATES)))
    engine.close()
    return {"losses": losses, "resumed": resumed}


def main(arguments: list[str]) -> int:
    out, world = Path(arguments[0]), join_ready()
    scratch = Path(world.broadcast(tempfile.mkdtemp(dir=out)))
    found = {case.name: run(case, world, scratch / case.name) for case in MUON_CASES}
    if world.is_first:
        (out / "found.json").write_text(json.dumps(found))
    world.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort an ordinary end now and then
