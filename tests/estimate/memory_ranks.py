"""Makes steps in every case, and counts the most bytes of tensors."""

import gc
from pathlib import Path

from live_memory import LiveMemory
from memory_cases import CASES, Case

from refocused.config.batch_plan import BatchPlan
from refocused.config.deepspeed import deepspeed_config
from refocused.config.optimization import OptimizerConfig, PrecisionConfig
from refocused.engine.build_engine import build_engine
from refocused.models.causal_lm import counted_parameters
from refocused.system.world import World


def peak_of(case: Case, world: World) -> int:
    """Return the most bytes of tensors during a step: the least of five after the first.

    gloo's threads let go of a finished transfer's tensors a little late on a busy machine, which
    adds them to one step's peak and not to another's.
    """
    optimizer = OptimizerConfig(lr=1e-3)
    precision = PrecisionConfig(dtype=case.dtype)
    with LiveMemory() as memory:
        model = case.built()
        memory.add(*model.parameters(), *model.buffers())
        settings = deepspeed_config(
            batch=BatchPlan(case.micro, 2, world.world_size, case.length),
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
    engine.close()
    return min(peaks[1:])


def measure(world: World, folder: Path) -> dict[str, int]:
    peaks = {}
    for case in CASES:
        peaks[case.name] = peak_of(case, world)
        gc.collect()
    return peaks
