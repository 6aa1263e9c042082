"""Trains every case by Muon on this rank, straight, interrupted, and on another number of ranks.

And in a plain loop with torch's own Muon, to compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from engine_cases import (
    LENGTH,
    OPTIMIZER,
    RANKS,
    RATES,
    SAVED_AT,
    Case,
    fresh_model,
    start_engine,
    windows,
)
from torch import Tensor

from refocused.engine import muon
from refocused.engine.engine import Engine
from refocused.engine.muon import FlatMatrices, scaled_orthogonal
from refocused.system.world import World

MUON = OPTIMIZER.model_copy(update={"kind": "muon"})
MUON_CASES = [
    *(Case(stage) for stage in (0, 1, 2, 3)),
    *(Case(stage, "gpt_neox", "bf16") for stage in (0, 1, 3)),
]


def updates_of_all(
    pieces: list[Tensor], shapes: Sequence[torch.Size], *, by_matrix: bool
) -> list[Tensor]:
    """Return what is wanted of each rank's piece: every matrix computed whole, and cut again."""
    ranks, gathered = len(pieces), torch.stack(pieces)
    wanted, place = torch.zeros_like(gathered), 0
    for shape in shapes:
        size = shape.numel()
        if by_matrix:
            chunk = -(-size // ranks)
            whole = gathered[:, place : place + chunk].flatten()
            update = scaled_orthogonal(whole[:size].view(shape)).flatten()
            padded = torch.nn.functional.pad(update, (0, len(whole) - size))
            wanted[:, place : place + chunk] = padded.view(ranks, chunk)
            place += chunk
        else:
            update = scaled_orthogonal(gathered.flatten()[place : place + size].view(shape))
            wanted.view(-1)[place : place + size] = update.flatten()
            place += size
    return list(wanted)


def train_plainly_by_muon(family: str) -> list[float]:
    """Return the losses of whole batches in float32, on whole matrices."""
    source = fresh_model(family).network
    model = transformers.AutoModelForCausalLM.from_config(source.config)
    model.load_state_dict(source.state_dict())
    named = dict(model.named_parameters())
    matrices = [
        p for name, p in named.items() if p.dim() == 2 and (".h." in name or ".layers." in name)
    ]
    others = [p for p in named.values() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(
        matrices,
        lr=0.0,
        weight_decay=MUON.weight_decay,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in others if p.dim() == 2], "weight_decay": MUON.weight_decay},
            {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=MUON.betas,
        eps=MUON.eps,
        foreach=False,
    )
    losses = []
    for rate, step in zip(RATES, windows(), strict=True):
        ids = step.reshape(-1, LENGTH + 1)
        loss = model(input_ids=ids, labels=ids).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MUON.clip)
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        losses.append(loss.item())
    return losses


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


def measure(world: World, folder: Path) -> dict[str, Any]:
    """Save on two ranks; on one, resume what they saved, stages 1 to 3 in turns."""
    if world.world_size == RANKS:
        return {case.name: run(case, world, folder / case.name) for case in MUON_CASES}
    found = {}
    for case in MUON_CASES:
        other = dataclasses.replace(case, stage=case.stage % 3 + 1 if case.stage else 0)
        found[case.name] = resume_anew(other, world, folder / case.name)
    return found
