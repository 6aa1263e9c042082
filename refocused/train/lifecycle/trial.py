"""Make the next step of a run that is ready to train, and save nothing: the end of `doctor`."""

import time
from typing import Any

import torch

from refocused.data.loader.batch import Batch
from refocused.data.order.windows import Position
from refocused.train.lifecycle.job import Job
from refocused.train.lifecycle.model_and_engine import Built
from refocused.train.step.guards import FiniteSteps, explaining_lack_of_memory
from refocused.train.step.loop import Parts, take_step
from refocused.train.step.state import TrainState


def take_trial_step(
    facts: dict[str, Any],
    job: Job,
    built: Built,
    parts: Parts,
    state: TrainState,
    micro_batches: list[Batch],
    after: Position,
) -> None:
    """Make one step, if one is left, and note in `facts` what it was, for JSON; all ranks call.

    Raises:
        RefocusedError: On every rank, or on one: why the run cannot train.
    """
    if state.step >= parts.total_steps:
        return
    began, world = time.monotonic(), parts.world
    finite = FiniteSteps(world, overflows=parts.engine.loss_scale() is not None)
    with explaining_lack_of_memory(job.plan, step=state.step + 1, world=world):
        taken = take_step(parts, micro_batches, state, after=after)
        finite.add(taken)
        finite.settle()
        loss = float(taken.losses.mean())  # waits for the device
    ended, peak_bytes = time.monotonic(), None
    if world.device_kind == "cuda":
        peak_bytes = world.largest([torch.cuda.max_memory_allocated(world.device)])[0]
    facts |= {
        "step": state.step + 1,
        "untrained_loss": parts.untrained_loss,
        "loss": world.total([loss])[0] / world.world_size,
        "tokens": job.plan.tokens * len(micro_batches) // job.plan.accumulation,
        "seconds": ended - began,  # in which everything runs for the first time
        "micro": job.plan.micro,
        "zero_stage": job.planned.choice.zero.stage,
        "compute": f"{built.mixing}, {built.compilation.text}",
        "planned_bytes": job.planned.choice.memory.peak,  # of a rank
        "peak_bytes": peak_bytes,  # on the fullest GPU; None without GPUs
        "gpu_bytes": job.planned.memory_bytes,  # of the smallest GPU; None without GPUs
    }
