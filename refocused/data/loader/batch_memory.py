"""The memory of batches: given out anew when the last tensor that used it is gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Shape = tuple[int, ...]


class BatchMemory:
    """Gives out zero-copy tensors and takes their memory back.

    The allocator of C would be asked by one thread and given back to by another, several MiB at a
    time: its heap creeps up over the epochs, and every batch finds pages that are new to it.

    Args:
        pin: Page-locked memory: comes from torch's caching host allocator, which gives it out
            again only when the copies to the GPU that read it are over; nothing here could know.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._free: dict[Shape, list[NDArray[np.int64]]] = {}

    def empty(self, shape: Shape) -> torch.Tensor:
        """Return an int64 tensor of any content, whose memory no living tensor shares.

        Memory of more along the first dimension serves for less: groups of steps are cut short
        where a shard is not open yet, and each size would keep memory of its own.
        """
        if self._pin:
            return torch.empty(shape, dtype=torch.int64, pin_memory=True)
        free = self._free.setdefault(shape[1:], [])
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(shape, np.int64)
        if len(memory) < shape[0]:
            memory = np.empty(shape, np.int64)
        # Lives as long as a tensor, or a view of one, uses it.
        lent = memory[: shape[0]].view(_Lent)
        lent.free, lent.memory = free, memory
        return torch.from_numpy(lent)


class _Lent(np.ndarray[Any, np.dtype[np.int64]]):
    """A view that gives its memory back; a `weakref.finalize` would take 1 us more a batch."""

    free: list[NDArray[np.int64]]
    memory: NDArray[np.int64]

    def __del__(self) -> None:
        self.free.append(self.memory)
