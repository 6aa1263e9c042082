"""The training loop, and the parts that it uses, imported for their types only."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.engine.finite_updates import Judge
from refocused.train.step.evaluation import evaluate, evaluate_at_start
from refocused.train.step.garbage_collection import Garbage
from refocused.train.step.guards import (
    FiniteSteps,
    StepTaken,
    explaining_lack_of_memory,
    fetch_together,
)

if TYPE_CHECKING:
    from refocused.config.batch_plan import BatchPlan
    from refocused.data.loader.batch import Batch
    from refocused.data.loader.loader import Loader
    from refocused.data.order.sequences import Position
    from refocused.engine.engine import Engine
    from refocused.engine.schedule import RatePlan
    from refocused.evaluate.multiple_choice import Examination
    from refocused.metrics.throughput import Throughput
    from refocused.system.logs import ProgressBar
    from refocused.system.world import World
    from refocused.train.step.evaluation import TextSampler
    from refocused.train.step.profile import StepProfiler
    from refocused.train.step.reporter import Reporter
    from refocused.train.step.saver import Saver
    from refocused.train.step.spikes import SpikeWatch
    from refocused.train.step.state import TrainState
    from refocused.train.step.step_figures import Cadence
    from refocused.train.step.stopping import StopReason, StopRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Everything the loop needs, built once by `refocused.train.lifecycle.build_run`."""

    world: World
    engine: Engine
    loader: Loader
    validation_batches: Callable[[], Iterator[Batch]]  # the same ones at every call
    plan: BatchPlan
    total_steps: int
    rates: RatePlan
    cadence: Cadence
    throughput: Throughput
    reporter: Reporter
    saver: Saver
    spikes: SpikeWatch
    validation_set: str  # fingerprint of these batches
    vocabulary: int  # ids that can be predicted
    vocabulary_rows: int  # rows of the embedding, padding included
    untrained_loss: float  # expected loss of a right initialisation on random tokens, in nats
    tasks: Sequence[Examination] = ()  # tasks to evaluate, the same on every rank
    sampler: TextSampler | None = None  # writes text samples; None if the run has no prompt
    profiler: StepProfiler | None = None  # None on other ranks and without `--profile`
    bar: ProgressBar | None = None  # None without a terminal


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How training ended."""

    state: TrainState
    stopped: StopReason


def train(parts: Parts, state: TrainState, stop: StopRequest) -> Outcome:
    """Train from a state to the run's last step, or until every rank agrees to stop.

    Raises:
        RefocusedError: On every rank alike: bad data, a non-finite loss, saves that keep failing.
        SpikeError: On every rank alike: the run should go back to before a spike.
    """
    stopping, taken = stop.agreed(), None
    losses: list[Tensor] = []  # of the steps since the last log line, on the device
    finite = FiniteSteps(parts.world, parts.spikes, overflows=parts.engine.loss_scale() is not None)
    if parts.bar is not None:
        parts.bar.show(state.step)
    if not stopping:
        state = evaluate_at_start(parts, state, stop)
        stopping = stop.agreed()
    with (
        Garbage() as garbage,
        parts.saver.finishing(),
        contextlib.closing(parts.loader.batches_from(state.position, made=state.step)) as batches,
    ):
        while state.step < parts.total_steps and not stopping:
            micro_batches = fetch_together(parts.world, batches.next_step, stop)
            if micro_batches is None:
                finite.settle()
                if losses:
                    state = parts.reporter.step(state, losses, batches.wait_seconds)
                if taken is not None:
                    state = parts.saver.save(state, (SaveReason.EMERGENCY,))
                return Outcome(state, stop.agreed())
            with explaining_lack_of_memory(parts.plan, step=state.step + 1, world=parts.world):
                taken = take_step(parts, micro_batches, state, after=batches.position)
            finite.add(taken)
            losses.append(taken.losses)
            garbage.step()
            epoch = state.position.epoch
            state = state.after_step(parts.plan, batches.position)
            parts.throughput.lap("step")
            if parts.bar is not None:
                parts.bar.show(state.step)
            if parts.profiler is not None:
                parts.profiler.after_step(batches.wait_seconds)
            stopping = stop.agreed()
            parts.saver.commit()
            last = state.step == parts.total_steps
            if last or parts.cadence.due("log", state.step) or stopping:
                finite.settle()
                state = parts.reporter.step(state, losses, batches.wait_seconds)
                losses.clear()
                garbage.collect()
                parts.saver.mirror.watch()
            if not stopping and (last or parts.cadence.evaluation_due(state.step)):
                _settle_step(parts, finite)
                state = evaluate(parts, state, stop)
                stopping = stop.agreed()
            reasons = parts.cadence.reasons_to_save(
                state.step,
                last=last,
                epoch_ended=state.position.epoch > epoch,
                is_best=state.best_step == state.step,
                stopping=bool(stopping),
            )
            if reasons:
                _settle_step(parts, finite)
                state = parts.saver.save(state, reasons, wait=last or bool(stopping))
    return Outcome(state, stopping)


def take_step(parts: Parts, batches: list[Batch], state: TrainState, after: Position) -> StepTaken:
    """Make a step on the sequences up to the position `after`, without waiting for the device."""
    weights = label_weights(parts.world, [batch.counted_labels for batch in batches])
    parts.world.progress.step(state.step + 1)
    parts.throughput.begin_step(work=len(batches) / parts.plan.gradient_accumulation_steps)
    parts.engine.begin_step(len(batches))
    losses = [
        parts.engine.accumulate(batch.input_ids, batch.labels, weight=weight)
        for batch, weight in zip(batches, weights, strict=True)
    ]
    parts.throughput.begin_update()
    if parts.cadence.due("histograms", state.step + 1):
        parts.reporter.histograms(state.step + 1, parts.engine.histograms())
    step, each = state.step + 1, torch.stack(losses)
    judge = Judge(each.mean(), parts.spikes.limits(step))
    verdict = parts.engine.update(parts.rates.at(state.step), judge)
    parts.throughput.end_step()
    return StepTaken(step, each, verdict, batches, state.position, after)


def label_weights(world: World, counted: Sequence[int | None]) -> list[float]:
    """Return factors of the micro-batches' mean losses that let every label count the same.

    The step's loss is the mean of the mean losses of all micro-batches of all ranks, in which a
    label among few would count more than one among many.

    Args:
        world: The ranks; if labels are ignored, every rank must call.
        counted: Labels of each micro-batch of this rank; None: no label is ignored anywhere.
    """
    known = [labels for labels in counted if labels is not None]
    if not known:
        return [1.0] * len(counted)
    mean = world.total([sum(known)])[0] / (len(known) * world.world_size)
    return [labels / mean if mean else 1.0 for labels in known]


def _settle_step(parts: Parts, finite: FiniteSteps) -> None:
    """Wait for the last step, and book its time before a validation or a save begins."""
    finite.settle()
    parts.throughput.lap("step", continued=True)
