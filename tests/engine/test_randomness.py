from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from refocused.engine.shard_files import capture, restore, seed_everything


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(),
        np.random.rand(),
        np.random.randn(),
        torch.rand(()).item(),
    ]


def test_a_restored_state_draws_the_same_again_after_a_trip_over_the_disk(tmp_path: Path) -> None:
    seed_everything(3, rank=0)
    draws()  # a gauss is now kept back in python's and numpy's generators
    torch.save(capture(), tmp_path / "state.pt")
    wanted = [draws(), draws()]
    seed_everything(99, rank=5)
    assert draws() not in wanted
    restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [draws(), draws()] == wanted


def test_a_captured_state_does_not_move_on() -> None:
    seed_everything(3, rank=0)
    state = capture()
    wanted = draws()
    restore(state)
    draws()
    restore(state)
    assert draws() == wanted


def test_a_seed_repeats_and_differs_among_ranks() -> None:
    def drawn(seed: int, rank: int) -> list[float]:
        seed_everything(seed, rank=rank)
        return draws()

    assert drawn(1, 0) == drawn(1, 0)
    for mine, other in zip(drawn(1, 0), drawn(1, 1), strict=True):
        assert mine != other


def test_the_largest_seed_of_a_run_is_taken() -> None:
    seed_everything(2**32 - 1, rank=7)  # numpy takes 32 bits
