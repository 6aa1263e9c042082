"""Makes steps in every case, and counts the most bytes of tensors."""

import gc
from pathlib import Path

import torch
from live_memory import LiveMemory
from memory_cases import CASES, Case

from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import deepspeed_config
from refocused.config.optimization import OptimizerConfig, PrecisionConfig
from refocused.engine import optimizer as muon
from refocused.engine.build_engine import build_engine
from refocused.models.causal_lm import counted_parameters
from refocused.system.world import World


def measured(case: Case, world: World, folder: Path) -> tuple[int, int]:
    """Return the most bytes of tensors during a step, and those of a checkpoint's large files.

    The peak is the least of five steps after the first.

    gloo's threads let go of a finished transfer's tensors a little late on a busy machine, which
    adds them to one step's peak and not to another's.
    """
    normuon = case.optimizer == "normuon"
    optimizer = OptimizerConfig(lr=1e-3, kind=case.kind, normuon=normuon)
    precision = PrecisionConfig(dtype=case.dtype)
    with LiveMemory() as memory:
        model = case.built()
        memory.add(*model.parameters(), *model.buffers())
        settings = deepspeed_config(
            batch=BatchPlan(case.micro_batch_size, 2, world.world_size, case.length),
            optimizer=optimizer,
            precision=precision,
            zero=case.zero,
            parameters=counted_parameters(model),
            fragment={},
        )
        engine = build_engine(
            model,
            block_class=model.block_class,
            settings=settings,
            optimizer=optimizer,
            precision=precision,
            world=world,
        )
        ids = case.ids()
        peaks = []
        for _ in range(6):
            world.barrier()
            gc.collect()
            memory.peak = 0
            for _ in range(2):
                engine.accumulate(ids, ids)
            engine.update(1e-3)
            peaks.append(memory.peak)
    if world.is_rank_0:
        (folder / "ranks").mkdir(parents=True)
    world.barrier()
    engine.save_shards(folder)
    engine.close()
    world.barrier()
    return min(peaks[1:]), sum(file.stat().st_size for file in (folder / "zero").glob("*.pt"))


def count_memory(world: World) -> dict[str, tuple[int, int]]:
    muon.iteration_type = lambda device: torch.bfloat16  # as on GPUs
    results = {}
    for case in CASES:
        results[case.name] = measured(case, world, Path.cwd() / case.name)
        gc.collect()
    return results
