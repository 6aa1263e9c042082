"""Time alternative kernels on the run's device, and describe their errors."""

import time
from collections.abc import Callable
from typing import Any

import torch

PASSES = 3
REASON_CHARACTERS = 120


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


def short_reason(raised: Exception) -> str:
    """Return an error on one line."""
    lines = [line.strip() for line in str(raised).splitlines() if line.strip()]
    return f"{type(raised).__name__}: {' '.join(lines)[:REASON_CHARACTERS]}"
