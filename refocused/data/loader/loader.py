"""The loader: one background thread keeps the next steps' batches ready."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from refocused.config.batch_plan import BatchPlan
from refocused.data.cache.steps import Pace, ShardPlanner, StepWindows, steps_from
from refocused.data.loader.batch import Batch, BatchReader
from refocused.data.loader.prefetch import Copies, DeviceCopier, ReadAhead
from refocused.data.order.mixture_order import Mixture
from refocused.data.order.position import Position
from refocused.data.order.window_order import Order, Stream
from refocused.data.order.windows import ValidationWindows

if TYPE_CHECKING:
    from refocused.data.cache.cache import ShardCache

STEPS_READY = 2  # one being copied to the device, one behind it; reading is far faster than a step


class Loader:
    """Gives one rank its batches from any position of the stream on.

    Args:
        order: The order of training.
        cache: The node's shards.
        plan: The batch of one step.
        rank: This rank, below `plan.world_size`.
        names: Names of all shards of the manifest, for messages.
        pin: Make page-locked tensors; needs a GPU.
        document_id: Id that begins each document, where they are masked.
        copier: Brings batches to the GPU ahead of their use; None: they stay where they are read.
        ahead: Shards fetched beyond the block in use (`data.fetch_ahead_shards`).
        room_bytes: Most that the shards of training may take on disk: `data.disk_limit_gb` less
            the pinned shards; None: no limit.
        ahead_seconds: Time of training whose shards are fetched ahead when that is more than
            `ahead` (`data.fetch_ahead_seconds`); None: time is not looked at.
        ahead_bytes: Most that the shards ahead may take (`data.fetch_ahead_gb`); None: no limit.
        clock: Seconds from any origin; measures waiting.
    """

    def __init__(
        self,
        order: Order | Mixture,
        cache: ShardCache,
        *,
        plan: BatchPlan,
        rank: int,
        names: Sequence[str],
        pin: bool,
        ahead: int,
        room_bytes: int | None,
        ahead_seconds: float | None = None,
        ahead_bytes: int | None = None,
        document_id: int | None = None,
        copier: DeviceCopier | None = None,
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
        self._ahead_seconds = ahead_seconds
        self._ahead_bytes = ahead_bytes
        self._document_id = document_id
        self._copier = copier
        self._clock = clock

    def batches_from(self, position: Position) -> BatchStream:
        """Start reading at a position; close the stream when it is no longer used."""
        order = self._order.stream_from(position)
        return BatchStream(
            steps_from(order, position, plan=self._plan, rank=self._rank),
            reader=BatchReader(
                self._cache,
                sequence_length=self._plan.sequence_length,
                names=self._names,
                pin=self._pin,
                document_id=self._document_id,
            ),
            planner=self._planner(order),
            # A resume over fewer windows may stand beyond the end of an epoch.
            position=order.position_at(order.number_of(position)),
            copier=self._copier,
            clock=self._clock,
        )

    def _planner(self, order: Stream) -> ShardPlanner:
        windows_per_shard = order.windows_per_epoch / order.shard_count
        return ShardPlanner(
            order,
            self._cache,
            ahead=self._ahead,
            room_bytes=self._room_bytes,
            ahead_seconds=self._ahead_seconds,
            ahead_bytes=self._ahead_bytes,
            pace=Pace(shards_per_step=self._plan.windows / windows_per_shard, clock=self._clock),
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
        copier: DeviceCopier | None,
        clock: Callable[[], float],
    ) -> None:
        self.position = position
        self.wait_seconds = 0.0
        self._steps = steps
        self._reader = reader
        self._planner = planner
        self._copier = copier
        self._clock = clock
        self._ahead = ReadAhead(
            self._read_steps(), ready=STEPS_READY, taken=lambda read: planner.training_on(read.step)
        )

    def next_step(self, patience_seconds: float | None = None) -> list[Batch] | None:
        """Return this rank's micro-batches of the next step, in the order of accumulation.

        Args:
            patience_seconds: How long to wait for them; None: until they are there.

        Returns:
            None when they are not there in time: call again, or stop.

        Raises:
            RefocusedError: What the reading thread met (a `ShardError`, for example), after the
                steps that it had handed over before.
            RuntimeError: The stream was closed.
        """
        self._planner.trained()
        began = self._clock()
        read = self._ahead.take(patience_seconds)
        self.wait_seconds += self._clock() - began
        if read is None:
            return None
        self.position = read.step.after
        return self._at_hand(read.batches)

    def close(self) -> None:
        """End the reading thread; one that waits for a shard is not waited for."""
        self._planner.close()
        self._ahead.close()

    def _read_steps(self) -> Iterator[_ReadStep]:
        for step in self._steps:
            self._planner.reading(step)
            passes = self._reader.read(step.shards, step.windows, micro=step.shards.shape[1])
            yield _ReadStep(step, self._copier.begin(passes) if self._copier else passes.batches())

    def _at_hand(self, batches: list[Batch] | Copies) -> list[Batch]:
        if not isinstance(batches, Copies):
            return batches
        assert self._copier is not None  # it began them
        return self._copier.hand_over(batches)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _ReadStep:
    """A step's windows, and the batches that were read of them."""

    step: StepWindows
    batches: list[Batch] | Copies


def validation_batches(
    chosen: ValidationWindows,
    cache: ShardCache,
    *,
    micro: int,
    rank: int,
    world_size: int,
    sequence_length: int,
    names: Sequence[str],
    pin: bool = False,
    document_id: int | None = None,
    source: str | None = None,
) -> Iterator[Batch]:
    """Yield one rank's share of the validation windows.

    Every rank yields the same number of batches, because under ZeRO-3 each pass gathers
    parameters from all ranks. Rows that are missing at the end have input 0 and ignored labels; a
    whole batch of them is possible, so losses must be summed and counted, not averaged by batch.

    Raises:
        ShardError: A shard does not become local.
    """
    reader = BatchReader(
        cache, sequence_length=sequence_length, names=names, pin=pin, document_id=document_id
    )
    for start in range(0, len(chosen.windows), micro * world_size):
        rows = slice(start + rank * micro, start + (rank + 1) * micro)
        one_pass = reader.read(chosen.shards[None, rows], chosen.windows[None, rows], micro=micro)
        (batch,) = one_pass.batches()
        yield dataclasses.replace(batch, source=source)
