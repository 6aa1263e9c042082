"""Copies of batches to the GPU on a stream of their own, begun steps before they are needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from refocused.data.loader.batch import Batch, Passes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Batches on their way to the device.

    Attributes:
        batches: With tensors on the device, not to be read before `DeviceCopier.hand_over`.
        memory: The tensors there that those are views of.
        arrived: CUDA event after the last copy.
    """

    batches: list[Batch]
    memory: list[torch.Tensor]
    arrived: Any


class DeviceCopier:
    """Copies page-locked batches beside the computation.

    One thread begins copies, another one hands them over to the stream that it computes on; none
    of them waits on the CPU.

    Args:
        device: The GPU.
        cuda: What torch does with it; tests put something else here.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)

    def begin(self, passes: Passes) -> Copies:
        """Enqueue the copies; the page-locked memory is reused only when torch sees them over."""
        with self._cuda.stream(self._stream):
            tokens = passes.tokens.to(self._device, non_blocking=True)
            memory, masked_labels = [tokens], None
            if passes.masked_labels is not None:
                masked_labels = passes.masked_labels.to(self._device, non_blocking=True)
                memory.append(masked_labels)
            there = dataclasses.replace(passes, tokens=tokens, masked_labels=masked_labels)
            return Copies(there.batches(), memory, self._stream.record_event())

    def hand_over(self, copies: Copies) -> list[Batch]:
        """Let the caller's stream wait for the copies, and keep their memory until it is done.

        The memory belongs to the copying stream, which could otherwise write the next step's
        batches there as soon as the tensors are dropped, while the computation still reads them.
        """
        computing = self._cuda.current_stream(self._device)
        computing.wait_event(copies.arrived)
        for tensor in copies.memory:
            tensor.record_stream(computing)
        return copies.batches
