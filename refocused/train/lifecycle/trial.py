"""One real step of a run, that leaves nothing behind: what `doctor` tries last."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

import torch

from refocused.config.batch_plan import plan_batch
from refocused.config.load_run import LoadedRun
from refocused.system.errors import StoppedEarlyError
from refocused.system.world import World
from refocused.train.lifecycle.build_run import assemble_data, assemble_engine, assemble_parts
from refocused.train.lifecycle.job import Job, Request, settle
from refocused.train.lifecycle.session import Session
from refocused.train.step.guards import FiniteSteps, explaining_lack_of_memory, fetch_together
from refocused.train.step.loop import take_step
from refocused.train.step.loss_check import check_first_loss
from refocused.train.step.parts import Parts
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopRequest


@dataclasses.dataclass(frozen=True, slots=True)
class TrialStep:
    """What the step was.

    Attributes:
        untrained_loss: On random tokens, before it, in nats.
        loss: Of its batch.
        tokens: In it.
        seconds: It took, the first time everything runs.
        build_seconds: Reading the data's headers and building model and engine took.
        wait_seconds: Until its batches were here.
        micro: Windows of a pass, as planned.
        zero_stage: As planned.
        compute: How the blocks are computed.
        planned_bytes: Memory of a rank by the plan.
        peak_bytes: Memory that was allocated at most, on the fullest GPU; None without GPUs.
        gpu_bytes: Memory of the smallest GPU; None without GPUs.
    """

    untrained_loss: float
    loss: float
    tokens: int
    seconds: float
    build_seconds: float
    wait_seconds: float
    micro: int
    zero_stage: int
    compute: str
    planned_bytes: int
    peak_bytes: float | None
    gpu_bytes: float | None


def take_trial_step(
    loaded: LoadedRun, request: Request, world: World, session: Session, *, folder: Path
) -> TrialStep:
    """Build a run from scratch and make its first step; every rank must call.

    Args:
        loaded: The run; where its checkpoints and mirror are does not matter.
        request: The command line.
        world: The ranks.
        session: Of this process.
        folder: In place of the run's; may be removed afterwards.

    Raises:
        RefocusedError: On every rank, or on one: why the run cannot train.
    """
    began = time.monotonic()
    loaded, planned = settle(_without_mirror(loaded), world, open_source=request.open_bucket)
    config = loaded.config
    plan = world.on_all_ranks(
        lambda: plan_batch(
            config.batch, world_size=world.world_size, sequence_length=config.model.sequence_length
        )
    )
    job = Job(loaded, request, planned, plan, world, folder)
    stop = StopRequest(
        world,
        stop_file=None,
        signalled=lambda: session.signals.asked,
        orphaned=lambda: session.ancestors.gone,
    )
    data = world.on_all_ranks(lambda: assemble_data(job))
    try:
        with explaining_lack_of_memory(plan, world=world):
            built = assemble_engine(job)
            parts = assemble_parts(job, data, built, began_seconds=began)
            untrained = check_first_loss(parts)
        build_seconds = time.monotonic() - began
        waited, seconds, loss = _step(parts, stop)
    finally:
        data.cache.close()
    return TrialStep(
        untrained_loss=untrained,
        loss=loss,
        tokens=plan.tokens,
        seconds=seconds,
        build_seconds=build_seconds,
        wait_seconds=waited,
        micro=plan.micro,
        zero_stage=planned.choice.zero.stage,
        compute=f"{built.mixing}, {built.compilation.text}",
        planned_bytes=planned.choice.memory.peak,
        peak_bytes=_peak_bytes(world),
        gpu_bytes=planned.memory_bytes,
    )


def _without_mirror(loaded: LoadedRun) -> LoadedRun:
    config = loaded.config
    checkpoint = config.checkpoint.model_copy(update={"mirror": None})
    return dataclasses.replace(loaded, config=config.model_copy(update={"checkpoint": checkpoint}))


def _step(parts: Parts, stop: StopRequest) -> tuple[float, float, float]:
    """Make the step; return the seconds until its batches came, its own, and its loss."""
    world, state = parts.world, TrainState()
    finite = FiniteSteps(world, overflows=parts.engine.loss_scale() is not None)
    began = time.monotonic()
    with contextlib.closing(parts.loader.batches_from(state.position)) as batches:
        micro_batches = fetch_together(world, batches.next_step, stop)
        if micro_batches is None:
            raise StoppedEarlyError("Stopped before the step was made.")
        waited = time.monotonic() - began
        with explaining_lack_of_memory(parts.plan, step=1, world=world):
            taken = take_step(parts, micro_batches, state)
            finite.add(taken)
            finite.settle()
            loss = float(taken.losses.mean())  # waits for the device
    seconds = time.monotonic() - began - waited
    return waited, seconds, world.total([loss])[0] / world.world_size


def _peak_bytes(world: World) -> float | None:
    if world.device_kind != "cuda":
        return None
    return world.largest([torch.cuda.max_memory_allocated(world.device)])[0]
