"""The random generators of one rank: DeepSpeed saves none of them, and dropout needs them all."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, *, rank: int) -> None:
    """Seed this rank's generators, each rank differently: dropout must differ among ranks."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def capture() -> dict[str, Any]:
    """Return the generators' states as tensors, numbers and lists (loads with weights_only)."""
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            place,
            has_gauss,
            gauss,
        ],
        "python": [version, list(numbers), next_gauss],
    }


def restore(state: dict[str, Any]) -> None:
    """Put the generators back to what `capture` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, gauss))
    version, numbers, next_gauss = state["python"]
    random.setstate((version, tuple(numbers), next_gauss))
