from __future__ import annotations

from typing import Any

import pytest

from refocused.config.optimization import ZeroConfig
from refocused.estimate.memory import state_memory


@pytest.mark.parametrize(
    ("stage", "gpu_bytes_a_parameter"), [(0, 20.0), (1, 6 + 16 / 8), (2, 2 + 20 / 8), (3, 22 / 8)]
)
def test_each_stage_spreads_more_of_the_state(stage: Any, gpu_bytes_a_parameter: float) -> None:
    memory = state_memory(8000, zero=ZeroConfig(stage=stage), dtype="bf16", ranks=8)
    assert memory.gpu == 8000 * gpu_bytes_a_parameter
    assert memory.host == memory.nvme == 0
    assert memory.gathered == (16_000 if stage == 3 else 0)


def test_float32_has_a_master_copy_only_under_zero() -> None:
    plain = state_memory(1000, zero=ZeroConfig(stage=0), dtype="fp32", ranks=1)
    spread = state_memory(1000, zero=ZeroConfig(stage=3), dtype="fp32", ranks=1)
    assert (plain.gpu, spread.gpu) == (16_000, 20_000)
    assert spread.gathered == 4000


def test_offloads_move_their_share_off_the_gpu() -> None:
    both = ZeroConfig(offload_optimizer="cpu", offload_parameters="cpu")
    memory = state_memory(8000, zero=both, dtype="bf16", ranks=8)
    assert (memory.gpu, memory.host, memory.nvme) == (0, 22_000, 0)
    drive = ZeroConfig(offload_optimizer="nvme", nvme_path="/nvme")
    memory = state_memory(8000, zero=drive, dtype="fp16", ranks=8)
    assert (memory.gpu, memory.host, memory.nvme) == (2000, 4000, 16_000)


def test_a_share_is_rounded_up() -> None:
    assert state_memory(10, zero=ZeroConfig(), dtype="bf16", ranks=4).gpu == 3 * 22
