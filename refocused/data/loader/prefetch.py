"""Make the next batches ahead of their use, and copy them to the device."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from refocused.data.loader.batch import Batch, Passes

CLOSING_SECONDS = 1.0  # a thread that waits for a shard is left to end with the process

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Batches on their way to the device, not to be read before `DeviceCopier.hand_over`."""

    batches: list[Batch]
    memory: list[torch.Tensor]  # the tensors there that the batches are views of
    arrived: Any  # CUDA event after the last copy


class DeviceCopier:
    """Copies page-locked batches beside the computation.

    One thread begins copies, another one hands them over to the stream that it computes on; none of
    them waits on the CPU. `cuda` is what torch does with the GPU; tests put something else here.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)

    def begin(self, passes: Passes) -> Copies:
        """Enqueue the copies; torch reuses the page-locked memory only when they are over."""
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


class ReadAhead(Generic[T]):
    """Items of an iterator, the next few (`ready`) made by a thread of its own.

    The iterator has no end, or marks its last item itself. `take` calls `taken` with each item,
    before another one may be made.
    """

    def __init__(
        self, items: Iterator[T], *, ready: int, taken: Callable[[T], None] = lambda item: None
    ) -> None:
        self._items = items
        self._taken = taken
        # Two queues in C: a condition in Python costs more than reading a batch does.
        self._ready: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        for _ in range(ready):
            self._room.put(None)
        self._thread = threading.Thread(target=self._make, name="read ahead", daemon=True)
        self._thread.start()

    def take(self, patience_seconds: float | None = None) -> T | None:
        """Return the next item; None if it is not there within `patience_seconds`.

        Raises whatever the iterator raised, after the items before it; `RuntimeError` if it was
        closed.
        """
        try:
            made = self._ready.get(timeout=patience_seconds)
        except queue.Empty:
            return None
        if self._closed:
            self._ready.put(made)  # for other threads that wait
            raise RuntimeError("take() of a ReadAhead that was closed")
        if isinstance(made, Exception):
            self._ready.put(made)  # nothing follows: the next call finds it again
            raise made
        self._taken(made[0])
        self._room.put(None)
        return made[0]

    def close(self) -> None:
        """End the thread; one that waits for a shard is not waited for."""
        self._closed = True
        self._room.put(None)
        self._ready.put(RuntimeError("closed"))
        self._thread.join(timeout=CLOSING_SECONDS)

    def _make(self) -> None:
        try:
            while True:
                self._room.get()
                if self._closed:
                    return
                self._ready.put((next(self._items),))
        except Exception as error:  # raised again by take, in the thread that can act on it
            self._ready.put(error)
