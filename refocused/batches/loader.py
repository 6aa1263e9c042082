"""The loader: one background thread keeps the next steps' batches ready."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from refocused.batches.batch import Batch, BatchReader
from refocused.batches.order import Order
from refocused.batches.position import Position
from refocused.batches.steps import ShardPlanner, StepWindows, steps_from
from refocused.config.batch_plan import BatchPlan

if TYPE_CHECKING:
    from refocused.shards.cache import ShardCache

STEPS_READY = 2  # one being copied to the device, one behind it; reading is far faster than a step
CLOSING_SECONDS = 1.0  # a thread that waits for a shard is left to end with the process


class Loader:
    """Gives one rank its batches from any position of the stream on.

    Args:
        order: The order of training.
        cache: The node's shards.
        plan: The batch of one step.
        rank: This rank, below `plan.world_size`.
        names: Names of all shards of the manifest, for messages.
        pin: Make page-locked tensors; needs a GPU.
        ahead: Shards fetched beyond the block in use (`data.fetch_ahead_shards`).
        room_bytes: Most that the shards of training may take on disk: `data.disk_limit_gb` less
            the pinned shards; None: no limit.
        clock: Seconds from any origin; measures waiting.
    """

    def __init__(
        self,
        order: Order,
        cache: ShardCache,
        *,
        plan: BatchPlan,
        rank: int,
        names: Sequence[str],
        pin: bool,
        ahead: int,
        room_bytes: int | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._order = order
        self._cache = cache
        self._plan = plan
        self._rank = rank
        self._names = names
        self._pin = pin
        self._ahead = ahead
        self._room_bytes = room_bytes
        self._clock = clock

    def batches_from(self, position: Position) -> BatchStream:
        """Start reading at a position; close the stream when it is no longer used."""
        return BatchStream(
            steps_from(self._order, position, plan=self._plan, rank=self._rank),
            reader=BatchReader(
                self._cache,
                sequence_length=self._plan.sequence_length,
                names=self._names,
                pin=self._pin,
            ),
            planner=ShardPlanner(
                self._order, self._cache, ahead=self._ahead, room_bytes=self._room_bytes
            ),
            # A resume over fewer windows may stand beyond the end of an epoch.
            position=position.advanced(0, windows_per_epoch=self._order.windows_per_epoch),
            clock=self._clock,
        )


class BatchStream:
    """Batches step by step, read ahead by one thread. `Loader.batches_from` makes it.

    Attributes:
        position: Position after the steps that were handed out.
        wait_seconds: Time that `next_step` has waited for batches, in all.
    """

    def __init__(
        self,
        steps: Iterator[StepWindows],
        *,
        reader: BatchReader,
        planner: ShardPlanner,
        position: Position,
        clock: Callable[[], float],
    ) -> None:
        self.position = position
        self.wait_seconds = 0.0
        self._steps = steps
        self._reader = reader
        self._planner = planner
        self._clock = clock
        self._ready: collections.deque[tuple[StepWindows, list[Batch]]] = collections.deque()
        self._failure: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read_ahead, name="batches", daemon=True)
        self._thread.start()

    def next_step(self) -> list[Batch]:
        """Return this rank's micro-batches of the next step, in the order of accumulation.

        Raises:
            RefocusedError: What the reading thread met (a `ShardError`, for example), after the
                steps that it had read before.
            RuntimeError: The stream was closed.
        """
        began = self._clock()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._failure or self._closed)
            self.wait_seconds += self._clock() - began
            if self._closed:
                raise RuntimeError("next_step() of a BatchStream that was closed")
            if not self._ready:
                assert self._failure is not None  # what else has ended the wait
                raise self._failure
            step, batches = self._ready.popleft()
            self._planner.training_on(step)
            self._changed.notify_all()
        self.position = step.after
        return batches

    def close(self) -> None:
        """End the reading thread; one that waits for a shard is not waited for."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(timeout=CLOSING_SECONDS)

    def _read_ahead(self) -> None:
        try:
            while self._has_room():
                step = next(self._steps)
                self._hand_over(step, self._read(step))
        except Exception as error:  # raised again by next_step, in the thread that can act on it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until another step may be read; False when the stream is closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < STEPS_READY or self._closed)
            return not self._closed

    def _read(self, step: StepWindows) -> list[Batch]:
        self._planner.reading(step)
        return [
            self._reader.read(shards, windows, micro=len(shards))
            for shards, windows in zip(step.shards, step.windows, strict=True)
        ]

    def _hand_over(self, step: StepWindows, batches: list[Batch]) -> None:
        with self._changed:
            if not self._closed:
                self._ready.append((step, batches))
                self._changed.notify_all()
