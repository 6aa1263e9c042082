"""Time an all-reduce and make the next step of a dry run, saving nothing: `doctor`'s trial."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from refocused.data.loader.batch import Batch
from refocused.data.order.sequences import Position
from refocused.system.atomic_files import replace_file
from refocused.system.world import World
from refocused.train.lifecycle.resume import expected_first_loss
from refocused.train.step.guards import FiniteSteps, explaining_lack_of_memory
from refocused.train.step.loop import Trainer, take_step
from refocused.train.step.state import TrainState

if TYPE_CHECKING:
    from refocused.train.lifecycle.trainer import Plan

CUDA_PAYLOAD_BYTES, CPU_PAYLOAD_BYTES = 256 * 2**20, 16 * 2**20
REPEATS = 10


class Trial:
    """Adds a measured all-reduce and a step to a dry run; rank 0 writes what it finds to `file`."""

    def __init__(self, file: Path, world: World) -> None:
        """Time an all-reduce; every rank must call."""
        self._file, self._world, self._began = file, world, time.monotonic()
        self._facts: dict[str, Any] = {}
        self._note(allreduce=measure_allreduce(world) if world.world_size > 1 else None)

    def _note(self, **facts: Any) -> None:
        self._facts |= facts
        if self._world.is_rank_0:
            replace_file(self._file, json.dumps(self._facts).encode())

    def take_step(
        self,
        trainer: Trainer,
        planned: Plan,
        compute: str,
        state: TrainState,
        micro_batches: list[Batch],
        after: Position,
    ) -> None:
        """Make one step, if one is left, and note what it was; every rank must call.

        Raises:
            RefocusedError: On every rank, or on one: why the run cannot train.
        """
        if state.step >= trainer.total_steps:
            self._note(step={})
            return
        began, world, plan = time.monotonic(), self._world, trainer.plan
        finite = FiniteSteps(world, overflows=trainer.engine.loss_scale() is not None)
        with explaining_lack_of_memory(plan, step=state.step + 1, world=world):
            taken = take_step(trainer, micro_batches, state, after=after)
            finite.add(taken)
            finite.settle()
            loss = float(taken.losses.mean())  # waits for the device
        ended, peak_bytes = time.monotonic(), None
        if world.device_kind == "cuda":
            peak_bytes = world.largest([torch.cuda.max_memory_allocated(world.device)])[0]
        facts = {
            "step": state.step + 1,
            "untrained_loss": expected_first_loss(trainer)[1],
            "loss": world.total([loss])[0] / world.world_size,
            "tokens": plan.tokens * len(micro_batches) // plan.gradient_accumulation_steps,
            "seconds": ended - began,  # in which everything runs for the first time
            "start_seconds": began - self._began,
            "micro_batch_size": plan.micro_batch_size,
            "zero_stage": planned.choice.zero.stage,
            "compute": compute,
            "planned_bytes": planned.choice.memory.peak,  # of a rank
            "peak_bytes": peak_bytes,  # on the fullest GPU; None without GPUs
            "gpu_bytes": planned.memory_bytes,  # of the smallest GPU; None without GPUs
        }
        self._note(step=facts)


def measure_allreduce(world: World) -> dict[str, Any]:
    """Time an all-reduce and check its result; every rank must call.

    Bus bandwidth: each link of a ring carries 2 (n - 1) / n of the payload (NCCL tests,
    doc/PERFORMANCE.md).
    """
    payload_bytes = CUDA_PAYLOAD_BYTES if world.device_kind == "cuda" else CPU_PAYLOAD_BYTES
    vector = torch.ones(payload_bytes // 4, device=world.device)
    dist.all_reduce(vector)
    is_right = bool((vector == world.world_size).all())
    vector.zero_()
    seconds = []
    for _ in range(REPEATS):
        world.barrier()
        began = time.perf_counter()
        dist.all_reduce(vector)
        vector[0].item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    slowest, wrong = world.largest([statistics.median(seconds), not is_right])
    share = 2 * (world.world_size - 1) / world.world_size
    return {
        "is_right": not wrong,
        "payload_bytes": payload_bytes,
        "seconds": slowest,
        "bus_bytes_per_second": share * payload_bytes / slowest,
    }
