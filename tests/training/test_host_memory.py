from __future__ import annotations

import pytest
from thread_ranks import on_two_ranks

from refocused.errors import ConfigError
from refocused.training.host_memory import (
    available_bytes,
    copied_bytes,
    require_memory_for_copies,
)
from refocused.world import World


@pytest.mark.parametrize(
    ("stage", "dtype", "first", "second"),
    [
        (0, "bf16", 14_000, 0),
        (0, "fp32", 16_000, 0),
        (1, "bf16", 8_000, 6_000),
        (2, "fp16", 8_000, 6_000),
        (3, "bf16", 6_000, 6_000),
    ],
)
def test_what_each_rank_copies(stage: int, dtype: str, first: int, second: int) -> None:
    ranks = [World(rank=rank, world_size=2) for rank in (0, 1)]
    found = [copied_bytes(1000, stage=stage, dtype=dtype, world=world) for world in ranks]
    assert found == [first, second]


def test_the_ranks_of_a_machine_share_its_memory() -> None:
    def action(world: World) -> None:
        require_memory_for_copies(600, world=world, available=lambda: 1200)
        require_memory_for_copies(600, world=world, available=lambda: None)
        require_memory_for_copies(600, world=world, available=lambda: 1199)

    for ended in on_two_ranks(action):
        assert isinstance(ended.error, ConfigError)
        assert "Set checkpoint.async=false" in str(ended.error)


def test_this_machine_has_some_memory_left() -> None:
    assert 2**20 < available_bytes() < 2**50
