"""The loader: a background thread reads the batches of the next steps."""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from refocused.config.batch_plan import BatchPlan
from refocused.data.cache.fetch_plan import ShardPlanner
from refocused.data.loader.batch import Batch, BatchReader, MicroBatches
from refocused.data.order.mixture_order import Mixture, Stream
from refocused.data.order.sequence_order import Order
from refocused.data.order.sequences import Located, Position

if TYPE_CHECKING:
    from refocused.config.data import DataConfig
    from refocused.data.cache.cache import ShardCache

STEPS_READY = 2  # one is copied to the device, one waits; reading is far faster than a step
# Sequences of one rank that are located in one call. More would delay the first step (2 ms).
WINDOWS_AT_ONCE = 4096
NUMBERS_AT_ONCE = 2**18  # of all ranks' sequences, 2 MiB: with many ranks few steps reach it
CLOSING_SECONDS = 1.0  # a thread that waits for a shard longer ends with the process

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepSequences:
    """One rank's sequences of one optimizer step."""

    shards: NDArray[
        np.int64
    ]  # [gradient_accumulation_steps, micro_batch_size]: shard of each of the rank's sequences
    sequences: NDArray[
        np.int64
    ]  # [gradient_accumulation_steps, micro_batch_size]: index of each sequence in its shard
    first_block: int  # block of the step's first sequence, over all ranks
    last_block: int  # block of its last sequence
    after: Position  # after the step


def steps_from(
    stream: Stream, position: Position, *, plan: BatchPlan, rank: int, made: int = 0
) -> Iterator[StepSequences]:
    """Yield one rank's share of the steps from a position on, endlessly; `made` are behind it.

    A step takes the next `plan.global_batch_size` sequences of the stream (fewer in the batch's
    warm-up), leaving out what is skipped, and distributes them by accumulation, then rank, then
    row. So the sequences of a step do not depend on how many ranks or micro-batches share them.
    """
    start = stream.number_of(position)
    for micro_batches, steps in itertools.groupby(
        range(made, plan.warmup_steps), plan.micro_batches
    ):
        small = dataclasses.replace(plan, gradient_accumulation_steps=micro_batches)
        for _, step in zip(steps, _equal_steps(stream, start, plan=small, rank=rank), strict=False):
            yield step
            start = stream.number_of(step.after)
    yield from _equal_steps(stream, start, plan=plan, rank=rank)


def _equal_steps(
    stream: Stream, start: int, *, plan: BatchPlan, rank: int
) -> Iterator[StepSequences]:
    """Yield steps of `plan.global_batch_size` from sequence number `start` on, endlessly."""
    size = plan.global_batch_size
    places = np.arange(size).reshape(
        plan.gradient_accumulation_steps, plan.shares, plan.micro_batch_size
    )
    share = places[:, rank // plan.sequence_parallel]
    # At most about one epoch: with tiny data, the first step would lay out hundreds of epochs.
    most = min(WINDOWS_AT_ONCE // share.size, stream.sequences_per_epoch // size)
    at_once = max(1, min(most, NUMBERS_AT_ONCE // size)) * size
    skipped, kept = np.array(sorted(stream.skipped), dtype=np.int64), np.empty(0, dtype=np.int64)
    while True:
        numbers = start + np.arange(at_once)
        start += at_once
        for skipped_range in stream.left_out:
            start = skipped_range.stop if start in skipped_range else start
            numbers = numbers[(numbers < skipped_range.start) | (numbers >= skipped_range.stop)]
        if skipped.size:
            numbers = numbers[~np.isin(stream.locate(numbers).shards, skipped)]
        kept = np.concatenate([kept, numbers])
        if len(kept) < at_once:
            continue
        steps, kept = kept[:at_once].reshape(-1, size), kept[at_once:]
        located = stream.locate(steps[:, share])
        blocks = stream.blocks_of(steps[:, [0, -1]]).tolist()
        for number, (first_block, last_block) in enumerate(blocks):
            yield StepSequences(
                shards=located.shards[number],
                sequences=located.sequences[number],
                first_block=first_block,
                last_block=last_block,
                after=stream.position_at(int(steps[number, -1]) + 1),
            )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Batches being copied to the device; read them only after `DeviceCopier.hand_over`."""

    batches: list[Batch]  # on the device
    arrived: Any  # CUDA event after the last copy


class DeviceCopier:
    """Copies page-locked batches while the GPU computes.

    One thread starts copies, another hands them over to its own stream; neither waits on the CPU.
    `cuda` is `torch.cuda` but in tests.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)

    def begin(self, micro_batches: MicroBatches) -> Copies:
        """Enqueue a copy; torch does not reuse the page-locked memory before it is done."""
        with self._cuda.stream(self._stream):
            tokens = micro_batches.tokens.to(self._device, non_blocking=True)
            batches = dataclasses.replace(micro_batches, tokens=tokens).batches()
            return Copies(batches, self._stream.record_event())

    def hand_over(self, copies: Copies) -> list[Batch]:
        """Make the caller's stream wait for the copies, and keep their memory until it is done.

        The memory belongs to the copying stream. Otherwise it could write the next step's batches
        there once the tensors are dropped, while the computation still reads them.
        """
        computing = self._cuda.current_stream(self._device)
        computing.wait_event(copies.arrived)
        first = copies.batches[0]  # a view of the memory of all
        for tensor in (first.input_ids, first.labels):
            tensor.record_stream(computing)
        return copies.batches


class ReadAhead(Generic[T]):
    """Runs an endless iterator in a thread that keeps the next `ready` items ready.

    `take` calls `taken` with each item before the thread may make another one.
    """

    def __init__(
        self, items: Iterator[T], *, ready: int, taken: Callable[[T], None] = lambda item: None
    ) -> None:
        self._items = items
        self._taken = taken
        # Two queues written in C: a condition in Python costs more than reading a batch.
        self._ready: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        for _ in range(ready):
            self._room.put(None)
        self._thread = threading.Thread(target=self._make, name="read ahead", daemon=True)
        self._thread.start()

    def take(self, timeout_seconds: float | None = None) -> T | None:
        """Return the next item; None if it is not ready within `timeout_seconds`.

        Raises what the iterator raised, after the items before it, and RuntimeError once closed.
        """
        try:
            made = self._ready.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        if self._closed:
            self._ready.put(made)  # for other waiting threads
            raise RuntimeError("take() of a ReadAhead that was closed")
        if isinstance(made, Exception):
            self._ready.put(made)  # nothing follows; the next call raises it again
            raise made
        self._taken(made[0])
        self._room.put(None)
        return made[0]

    def close(self) -> None:
        """Stop the thread; wait at most `CLOSING_SECONDS`."""
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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Loader:
    """Gives one rank its batches, from any position of the stream on."""

    order: Order | Mixture
    cache: ShardCache
    plan: BatchPlan
    rank: int  # below `plan.world_size`
    data: DataConfig
    room_bytes: int | None = None  # for the shards of the stream; None: no limit
    pin: bool = False  # return page-locked tensors; needs a GPU
    copier: DeviceCopier | None = None  # None: batches stay on the CPU
    clock: Callable[[], float] = time.perf_counter  # in seconds; measures waiting

    def batches_from(self, position: Position, *, made: int = 0) -> BatchStream:
        """Start reading at a position, after `made` steps; close the stream after use."""
        return BatchStream(self, position, made=made)

    def leave_out(self, parts: Iterable[tuple[int, int]]) -> None:
        """Also skip sequences A to B - 1 of the stream for each (A, B), in streams made later."""
        ranges = (*self.order.left_out, *(range(*ends) for ends in parts))
        self.order.left_out = list(dict.fromkeys(ranges))

    def reader(self) -> BatchReader:
        """Return a reader of this loader's sequences."""
        return BatchReader(
            self.cache,
            sequence_length=self.plan.sequence_length,
            pin=self.pin,
            document_id=self.data.masked_id,
        )

    def validation_batches(self, chosen: Located, *, source: str | None = None) -> Iterator[Batch]:
        """Yield this rank's share of the validation sequences.

        Every rank yields the same number of batches, because under ZeRO-3 each pass gathers
        parameters from all ranks. Rows without a sequence, at the end, have input 0 and ignored
        labels. A whole batch may have none, so sum and count losses instead of averaging batches.
        """
        reader, micro_batch_size = self.reader(), self.plan.micro_batch_size
        first = self.rank // self.plan.sequence_parallel * micro_batch_size
        for start in range(
            first, first + len(chosen.sequences), micro_batch_size * self.plan.shares
        ):
            rows = slice(start, start + micro_batch_size)
            micro_batch = reader.read(
                chosen.shards[None, rows],
                chosen.sequences[None, rows],
                micro_batch_size=micro_batch_size,
            )
            copier = self.copier
            (batch,) = (
                copier.hand_over(copier.begin(micro_batch)) if copier else micro_batch.batches()
            )
            yield dataclasses.replace(batch, source=source)


class BatchStream:
    """The batches of each step, read ahead by a thread; made by `Loader.batches_from`.

    `position` is that after the last step returned, `wait_seconds` the total wait of `next_step`.
    """

    def __init__(self, loader: Loader, position: Position, *, made: int = 0) -> None:
        stream = loader.order.stream_from(position)
        # After a resume with fewer sequences, the position may be beyond the end of an epoch.
        self.position = stream.position_at(stream.number_of(position))
        self.wait_seconds = 0.0
        self._clock = loader.clock
        self._copier = loader.copier
        self._reader = loader.reader()
        self._steps = steps_from(stream, position, plan=loader.plan, rank=loader.rank, made=made)
        self._planner = ShardPlanner(
            stream,
            loader.cache,
            data=loader.data,
            room_bytes=loader.room_bytes,
            step_sequences=loader.plan.global_batch_size,
            clock=loader.clock,
        )
        training_on = self._planner.training_on
        self._ahead = ReadAhead(
            self._read_steps(),
            ready=STEPS_READY,
            taken=lambda read: training_on(read[0].first_block),
        )

    def next_step(self, timeout_seconds: float | None = None) -> list[Batch] | None:
        """Return this rank's micro-batches of the next step, in the order of accumulation.

        Returns None if they are not ready within `timeout_seconds`; it may be called again.

        Raises:
            ShardError: A shard cannot be read. Steps read before are returned first.
            RuntimeError: The stream was closed.
        """
        self._planner.trained()
        began = self._clock()
        read = self._ahead.take(timeout_seconds)
        self.wait_seconds += self._clock() - began
        if read is None:
            return None
        step, batches = read
        self.position = step.after
        if isinstance(batches, Copies):
            assert self._copier is not None  # it started the copies
            return self._copier.hand_over(batches)
        return batches

    def close(self) -> None:
        """Stop the reading thread, without waiting for a shard that it waits for."""
        self._planner.close()
        self._ahead.close()

    def _read_steps(self) -> Iterator[tuple[StepSequences, list[Batch] | Copies]]:
        for step in self._steps:
            self._planner.reading(step.first_block, step.last_block)
            micro_batches = self._reader.read(
                step.shards, step.sequences, micro_batch_size=step.shards.shape[1]
            )
            yield (
                step,
                self._copier.begin(micro_batches) if self._copier else micro_batches.batches(),
            )
