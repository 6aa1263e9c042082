"""Time alternative kernels on the run's device."""

import time
from collections.abc import Callable
from typing import Any

import torch

PASSES = 3


def fastest_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the time of the fastest of `PASSES` runs on a GPU, after a warm-up."""
    taken = []
    for _ in range(1 + PASSES):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])
