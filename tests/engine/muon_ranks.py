"""Trains every case by Muon on this rank, straight, interrupted, and on another number of ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_cases import RANKS, RATES, SAVED_AT, Case, join_ready, start_engine, windows
from muon_cases import MUON, MUON_CASES, updates_of_all
from torch import Tensor

from refocused.engine import muon
from refocused.engine.engine import Engine
from refocused.engine.muon import FlatMatrices
from refocused.system.world import World


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


class Observed:
    """Counts the matrices that this rank makes orthogonal, and compares with all of them whole."""

    def __init__(self, *, stage: int) -> None:
        self.computed, self.as_if_whole = 0, True
        orthogonal, update = muon.orthogonal, FlatMatrices.update

        def counting(matrix: Tensor) -> Tensor:
            self.computed += 1
            return orthogonal(matrix)

        def comparing(flat: FlatMatrices, piece: Tensor) -> Tensor:
            muon.orthogonal = counting
            found = update(flat, piece)
            muon.orthogonal = orthogonal
            pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, piece)
            wanted = updates_of_all(pieces, flat.shapes, by_matrix=stage == 3)[dist.get_rank()]
            self.as_if_whole &= torch.equal(found, wanted)
            return found

        FlatMatrices.update = comparing  # type: ignore[method-assign]
        self.stop = lambda: setattr(FlatMatrices, "update", update)


def run(case: Case, world: World, folder: Path) -> dict[str, Any]:
    engine = start_engine(case, world, optimizer=MUON)
    observed = Observed(stage=case.stage)
    losses = train(engine, world, range(SAVED_AT))
    if world.is_rank_0:
        (folder / "ranks").mkdir(parents=True)
    world.barrier()
    written = engine.save_shards(folder)
    assert not written.errors, written.errors
    losses += train(engine, world, range(SAVED_AT, len(RATES)))
    observed.stop()
    engine.close()
    world.barrier()
    engine = start_engine(case, world, seed=99, optimizer=MUON)
    engine.load_shards(folder)
    resumed = train(engine, world, range(SAVED_AT, len(RATES)))
    engine.close()
    return {
        "losses": losses,
        "resumed": resumed,
        "resharded": resume_anew(case, world, folder),
        "computed": world.gather(observed.computed),
        "as if whole": world.gather(observed.as_if_whole),
    }


def resume_anew(case: Case, world: World, folder: Path) -> list[float]:
    """Resume what two ranks saved on this number of them; return the losses of the last steps."""
    if case.stage == 0:
        return []
    engine = start_engine(case, world, seed=98, optimizer=MUON)
    engine.load_resharded(folder, ranks=RANKS)
    losses = train(engine, world, range(SAVED_AT, len(RATES)))
    engine.close()
    return losses


def main(arguments: list[str]) -> int:
    """Save on two ranks; on one, resume what they saved, stages 1 to 3 in turns."""
    out, world = Path(arguments[0]), join_ready()
    found: dict[str, Any] = {}
    for case in MUON_CASES:
        if world.world_size == RANKS:
            found[case.name] = run(case, world, out / case.name)
        else:
            other = dataclasses.replace(case, stage=case.stage % 3 + 1 if case.stage else 0)
            found[case.name] = resume_anew(other, world, out / case.name)
    if world.is_rank_0:
        (out / f"on_{world.world_size}.json").write_text(json.dumps(found))
    world.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort an ordinary end now and then
