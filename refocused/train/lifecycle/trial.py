"""Take one real step of a run without leaving files: the last check of `doctor`."""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from refocused.config.load_run import LoadedRun
from refocused.system.errors import StoppedEarlyError
from refocused.system.world import World
from refocused.train.lifecycle.build_run import assemble_data, assemble_parts
from refocused.train.lifecycle.job import Job, Request, settle
from refocused.train.lifecycle.model_and_engine import assemble_engine
from refocused.train.lifecycle.session import Session
from refocused.train.step.guards import FiniteSteps, explaining_lack_of_memory, fetch_together
from refocused.train.step.loop import take_step
from refocused.train.step.loss_check import check_first_loss
from refocused.train.step.state import TrainState


def take_trial_step(
    loaded: LoadedRun, request: Request, world: World, session: Session, *, folder: Path
) -> dict[str, Any]:
    """Build a run from scratch and make its first step; every rank must call.

    The run's mirror is not used, and `folder`, which may be removed afterwards, replaces its own.

    Returns:
        What the step was, for JSON.

    Raises:
        RefocusedError: On every rank, or on one: why the run cannot train.
    """
    began = time.monotonic()
    checkpoint = loaded.config.checkpoint.model_copy(update={"mirror": None})
    batch = loaded.config.batch.model_copy(update={"warmup_steps": None})  # a whole step
    config = loaded.config.model_copy(update={"checkpoint": checkpoint, "batch": batch})
    loaded = dataclasses.replace(loaded, config=config)
    loaded, planned = settle(loaded, world, open_source=request.open_bucket)
    job = Job(loaded, request, planned, world, folder)
    stop = session.stop_request(world, stop_file=None)
    data = world.on_all_ranks(lambda: assemble_data(job))
    with contextlib.closing(data.cache):
        with explaining_lack_of_memory(job.plan, world=world):
            built = assemble_engine(loaded, planned, world)
            parts = assemble_parts(job, data, built, began_seconds=began)
            untrained = check_first_loss(parts)
        built_at = time.monotonic()
        finite = FiniteSteps(world, overflows=parts.engine.loss_scale() is not None)
        with contextlib.closing(parts.loader.batches_from(TrainState().position)) as batches:
            micro_batches = fetch_together(world, batches.next_step, stop)
            if micro_batches is None:
                raise StoppedEarlyError("Stopped before the step was made.")
            fetched_at = time.monotonic()
            with explaining_lack_of_memory(job.plan, step=1, world=world):
                taken = take_step(parts, micro_batches, TrainState(), after=batches.position)
                finite.add(taken)
                finite.settle()
                loss = float(taken.losses.mean())  # waits for the device
        ended_at = time.monotonic()
    peak_bytes = None
    if world.device_kind == "cuda":
        peak_bytes = world.largest([torch.cuda.max_memory_allocated(world.device)])[0]
    return {
        "untrained_loss": untrained,  # on random tokens, before the step, in nats
        "loss": world.total([loss])[0] / world.world_size,
        "tokens": job.plan.tokens,
        "seconds": ended_at - fetched_at,  # in which everything runs for the first time
        "build_seconds": built_at - began,  # with the headers of the data
        "wait_seconds": fetched_at - built_at,  # for the batches
        "micro": job.plan.micro,
        "zero_stage": planned.choice.zero.stage,
        "compute": f"{built.mixing}, {built.compilation.text}",
        "planned_bytes": planned.choice.memory.peak,  # of a rank
        "peak_bytes": peak_bytes,  # on the fullest GPU; None without GPUs
        "gpu_bytes": planned.memory_bytes,  # of the smallest GPU; None without GPUs
    }
