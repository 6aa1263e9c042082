"""What one thread makes ahead of its use, handed out in order; waiting for it can be given up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
CLOSING_SECONDS = 1.0  # a thread that waits for a shard is left to end with the process


class ReadAhead(Generic[T]):
    """Items of an iterator, the next few of them made by a thread of their own.

    Args:
        items: Has no end, or tells by an item of its own that it was the last.
        ready: Items that are made before one of them is taken.
        taken: Called by `take` with each item, before another one may be made.
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
        """Return the next item; None when it is not there in time.

        Args:
            patience_seconds: How long to wait; None: until it is there.

        Raises:
            Exception: Whatever the iterator raised, after the items before it.
            RuntimeError: It was closed.
        """
        try:
            made = self._ready.get(timeout=patience_seconds)
        except queue.Empty:
            return None
        if self._closed:
            self._ready.put(made)  # for whoever else waits
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
            while self._has_room():
                self._ready.put((next(self._items),))
        except Exception as error:  # raised again by take, in the thread that can act on it
            self._ready.put(error)

    def _has_room(self) -> bool:
        """Wait until another item may be made; False when it is closed."""
        self._room.get()
        return not self._closed
