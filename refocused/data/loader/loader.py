"""The loader: one background thread keeps the next steps' batches ready."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from refocused.config.batch_plan import BatchPlan
from refocused.data.cache.fetch_plan import FetchAhead, ShardPlanner
from refocused.data.loader.batch import Batch, BatchReader
from refocused.data.loader.prefetch import Copies, DeviceCopier, ReadAhead
from refocused.data.order.mixture_order import Mixture, Stream
from refocused.data.order.position import Position
from refocused.data.order.window_order import Order
from refocused.data.order.windows import ValidationWindows

if TYPE_CHECKING:
    from refocused.data.cache.cache import ShardCache

STEPS_READY = 2  # one being copied to the device, one behind it; reading is far faster than a step
# Of one rank, located together: numpy's cost per call is shared, and the first waits for 2 ms.
WINDOWS_AT_ONCE = 4096


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepWindows:
    """One optimizer step as one rank sees it."""

    shards: NDArray[np.int64]  # [accumulation, micro]: shard of each of the rank's windows
    windows: NDArray[np.int64]  # [accumulation, micro]: index of each window in its shard
    first_block: int  # that holds the first window of the step, of any rank
    last_block: int
    after: Position  # when the step is done


def steps_from(
    stream: Stream, position: Position, *, plan: BatchPlan, rank: int
) -> Iterator[StepWindows]:
    """Yield one rank's share of the steps from a position on, without end.

    A step takes the next `plan.windows` windows of the stream, without those of skipped shards, and
    deals them out in the order accumulation, rank, row. So the windows of a step depend on their
    number alone, not on how many ranks or passes share them.
    """
    share = np.arange(plan.windows).reshape(plan.accumulation, plan.world_size, plan.micro)[:, rank]
    # About one epoch at most: tiny data would have to lay out hundreds of them for the first step.
    most = min(WINDOWS_AT_ONCE // share.size, stream.windows_per_epoch // plan.windows)
    start = stream.number_of(position)
    for numbers in _numbers_from(stream, start, steps=max(1, most), windows=plan.windows):
        located = stream.locate(numbers[:, share])
        blocks = stream.blocks_of(numbers[:, [0, -1]]).tolist()
        for number, (first_block, last_block) in enumerate(blocks):
            yield StepWindows(
                shards=located.shards[number],
                windows=located.windows[number],
                first_block=first_block,
                last_block=last_block,
                after=stream.position_at(int(numbers[number, -1]) + 1),
            )


def _numbers_from(
    stream: Stream, start: int, *, steps: int, windows: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the numbers of the windows of so many steps, shape [steps, windows], without end."""
    skipped, kept = np.array(sorted(stream.skipped), dtype=np.int64), np.empty(0, dtype=np.int64)
    while True:
        numbers = start + np.arange(steps * windows)
        start += steps * windows
        if skipped.size:
            numbers = numbers[~np.isin(stream.locate(numbers).shards, skipped)]
        kept = np.concatenate([kept, numbers])
        if len(kept) >= steps * windows:
            yield kept[: steps * windows].reshape(steps, windows)
            kept = kept[steps * windows :]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Loader:
    """Gives one rank its batches, from any position of the stream on."""

    order: Order | Mixture
    cache: ShardCache
    plan: BatchPlan
    rank: int  # below `plan.world_size`
    ahead: FetchAhead
    pin: bool = False  # make page-locked tensors; needs a GPU
    document_id: int | None = None  # begins each document, where they are masked
    copier: DeviceCopier | None = None  # None: batches stay where they are read
    clock: Callable[[], float] = time.perf_counter  # measures waiting

    def batches_from(self, position: Position) -> BatchStream:
        """Start reading at a position; close the stream when it is no longer used."""
        return BatchStream(self, position)

    def reader(self) -> BatchReader:
        """Return what reads this loader's batches out of the cache."""
        return BatchReader(
            self.cache,
            sequence_length=self.plan.sequence_length,
            pin=self.pin,
            document_id=self.document_id,
        )

    def validation_batches(
        self, chosen: ValidationWindows, *, source: str | None = None
    ) -> Iterator[Batch]:
        """Yield this rank's share of the validation windows.

        Every rank yields equally many batches, because under ZeRO-3 each pass gathers parameters
        from all ranks. Rows that are missing at the end have input 0 and ignored labels; a whole
        batch of them is possible, so losses must be summed and counted, not averaged by batch.
        """
        reader, micro = self.reader(), self.plan.micro
        for start in range(0, len(chosen.windows), micro * self.plan.world_size):
            rows = slice(start + self.rank * micro, start + (self.rank + 1) * micro)
            one = reader.read(chosen.shards[None, rows], chosen.windows[None, rows], micro=micro)
            yield dataclasses.replace(one.batches()[0], source=source)


class BatchStream:
    """Batches step by step, read ahead by one thread. `Loader.batches_from` makes it.

    `position` is that after the steps handed out; `wait_seconds` is the total wait of `next_step`.
    """

    def __init__(self, loader: Loader, position: Position) -> None:
        stream = loader.order.stream_from(position)
        # A resume over fewer windows may stand beyond the end of an epoch.
        self.position = stream.position_at(stream.number_of(position))
        self.wait_seconds = 0.0
        self._clock = loader.clock
        self._copier = loader.copier
        self._reader = loader.reader()
        self._steps = steps_from(stream, position, plan=loader.plan, rank=loader.rank)
        self._planner = ShardPlanner(
            stream,
            loader.cache,
            ahead=loader.ahead,
            step_windows=loader.plan.windows,
            clock=loader.clock,
        )
        training_on = self._planner.training_on
        self._ahead = ReadAhead(
            self._read_steps(),
            ready=STEPS_READY,
            taken=lambda read: training_on(read[0].first_block),
        )

    def next_step(self, patience_seconds: float | None = None) -> list[Batch] | None:
        """Return this rank's micro-batches of the next step, in the order of accumulation.

        None if they are not there within `patience_seconds`: call again, or stop. Raises what the
        reading thread met (a `ShardError`, for example), after the steps that it had handed over
        before, and `RuntimeError` if the stream was closed.
        """
        self._planner.trained()
        began = self._clock()
        read = self._ahead.take(patience_seconds)
        self.wait_seconds += self._clock() - began
        if read is None:
            return None
        step, batches = read
        self.position = step.after
        if isinstance(batches, Copies):
            assert self._copier is not None  # it began them
            return self._copier.hand_over(batches)
        return batches

    def close(self) -> None:
        """End the reading thread; one that waits for a shard is not waited for."""
        self._planner.close()
        self._ahead.close()

    def _read_steps(self) -> Iterator[tuple[StepWindows, list[Batch] | Copies]]:
        for step in self._steps:
            self._planner.reading(step.first_block, step.last_block)
            passes = self._reader.read(step.shards, step.windows, micro=step.shards.shape[1])
            yield step, self._copier.begin(passes) if self._copier else passes.batches()
