"""One rank that trains every case straight and interrupted twice."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from engine_cases import LENGTH, MICRO, OPTIMIZER, RANKS, SHAPES, VOCABULARY, join_ready
from exactness_cases import EXACTNESS_CASES, SAVED_AT, STEPS, ExactnessCase

from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import deepspeed_config
from refocused.config.optimization import PrecisionConfig, ZeroConfig
from refocused.engine.build_engine import build_engine
from refocused.engine.engine import Engine
from refocused.engine.shard_files import seed_everything
from refocused.models.causal_lm import counted_parameters
from refocused.models.families import build_model
from refocused.system.world import World


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


def main(arguments: list[str]) -> int:
    world = join_ready()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    out = Path(arguments[0])
    found = {}
    for case in EXACTNESS_CASES:
        scratch = Path(world.broadcast(tempfile.mkdtemp(dir=out)))
        found[case.name] = run(case, world, scratch)
    (out / f"{world.rank}.json").write_text(json.dumps(found))
    world.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort an ordinary end now and then
