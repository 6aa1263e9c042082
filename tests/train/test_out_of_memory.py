from __future__ import annotations

import pytest
import torch

from refocused.config.batch_plan import BatchPlan
from refocused.system.errors import TrainingError
from refocused.system.world import World
from refocused.train.step.guards import explaining_lack_of_memory

PLAN = BatchPlan(micro=8, accumulation=16, world_size=4, sequence_length=2048)


def explained(plan: BatchPlan, step: int | None = 7) -> str:
    with (
        pytest.raises(TrainingError) as raised,
        explaining_lack_of_memory(plan, world=World(), step=step),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return str(raised.value)


def test_half_of_the_micro_batch_makes_the_same_step() -> None:
    text = explained(PLAN)
    assert text.startswith(
        "Out of GPU memory on rank 0 at step 7 (0.0 of 0.0 GiB). Micro batch 8 x 2048 tokens. "
        "Try batch.micro=4 (same tokens a step, 32 accumulation steps"
    )
    assert "model.activation_checkpointing=true" in text
    assert explained(PLAN, None).startswith("Out of GPU memory on rank 0 outside of a step")


def test_one_window_cannot_be_halved() -> None:
    text = explained(BatchPlan(micro=1, accumulation=16, world_size=4, sequence_length=2048))
    assert "batch.micro=" not in text
    assert "Try model.activation_checkpointing=true; PYTORCH_CUDA_ALLOC_CONF=" in text


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), explaining_lack_of_memory(PLAN, world=World()):
        raise ZeroDivisionError
