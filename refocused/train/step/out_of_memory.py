"""What to change when a GPU's memory is not enough."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from refocused.config.batch_plan import BatchPlan
from refocused.system.errors import TrainingError
from refocused.system.world import World


@contextlib.contextmanager
def explaining_lack_of_memory(
    plan: BatchPlan, *, world: World, step: int | None = None
) -> Iterator[None]:
    """Turn torch's error into ours, on the rank that it meets.

    Args:
        plan: The batch of a step.
        world: The ranks.
        step: The step that is made; None: the engine is built, or a loss is measured.

    Raises:
        TrainingError: The GPU's memory was not enough.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        used, total = 0.0, 0.0
        if world.device_kind == "cuda":
            free, whole = torch.cuda.mem_get_info(world.device)
            used, total = (whole - free) / 2**30, whole / 2**30
        raise TrainingError(
            lack_of_memory(plan, rank=world.rank, step=step, used_gib=used, total_gib=total)
        ) from error


def lack_of_memory(
    plan: BatchPlan, *, rank: int, step: int | None, used_gib: float, total_gib: float
) -> str:
    """Say what was not enough, and which settings take less."""
    smaller = next((d for d in range(plan.micro // 2, 0, -1) if plan.micro % d == 0), None)
    checkpointing = "model.activation_checkpointing=true"
    tries = checkpointing
    if smaller is not None:
        accumulation = plan.accumulation * plan.micro // smaller
        tries = (
            f"batch.micro={smaller} (same tokens a step, {accumulation} accumulation steps: with "
            f"batch.accumulation in the run file set that too) or {checkpointing}"
        )
    when = "outside of a step" if step is None else f"at step {step:,}"
    return (
        f"Out of GPU memory on rank {rank} {when} ({used_gib:.1f} of {total_gib:.1f} GiB). Micro "
        f"batch {plan.micro} x {plan.sequence_length} tokens. Try {tries}; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment loses less between "
        "blocks of memory."
    )
