from __future__ import annotations

import pytest
import torch

from refocused.config.batch_plan import BatchPlan
from refocused.system.errors import TrainingError
from refocused.system.world import World
from refocused.train.step.guards import explaining_lack_of_memory, lack_of_memory

PLAN = BatchPlan(micro=8, accumulation=16, world_size=4, sequence_length=2048)


def test_half_of_the_micro_batch_makes_the_same_step() -> None:
    text = lack_of_memory(PLAN, rank=3, step=1, used_gib=79.1, total_gib=79.6)
    assert text.startswith(
        "Out of GPU memory on rank 3 at step 1 (79.1 of 79.6 GiB). Micro batch 8 x 2048 tokens. "
        "Try batch.micro=4 (same tokens a step, 32 accumulation steps"
    )
    assert "model.activation_checkpointing=true" in text


def test_one_window_cannot_be_halved() -> None:
    single = BatchPlan(micro=1, accumulation=16, world_size=4, sequence_length=2048)
    text = lack_of_memory(single, rank=0, step=5, used_gib=1, total_gib=1)
    assert "batch.micro=" not in text
    assert "Try model.activation_checkpointing=true; PYTORCH_CUDA_ALLOC_CONF=" in text


def test_other_errors_pass() -> None:
    world = World(rank=0, local_rank=0, world_size=1, local_world_size=1, device_kind="cpu")
    with (
        pytest.raises(TrainingError, match="Out of GPU memory on rank 0 at step 7"),
        explaining_lack_of_memory(PLAN, step=7, world=world),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with (
        pytest.raises(TrainingError, match="Out of GPU memory on rank 0 outside of a step"),
        explaining_lack_of_memory(PLAN, world=world),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(ZeroDivisionError), explaining_lack_of_memory(PLAN, step=7, world=world):
        raise ZeroDivisionError
