"""The trainer and its loop; what the trainer holds is imported for its types only."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
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
    from pathlib import Path

    from refocused.checkpoints.resume.catalog import Catalog
    from refocused.config.batch_plan import BatchPlan
    from refocused.config.cadence import Cadence
    from refocused.config.model_shape import ModelShape
    from refocused.config.run_config import RunConfig
    from refocused.data.loader.batch import Batch
    from refocused.data.loader.open_data import DataParts
    from refocused.data.order.sequences import Position
    from refocused.engine.engine import Engine
    from refocused.engine.schedule import RatePlan
    from refocused.evaluate.multiple_choice import EncodedTask
    from refocused.evaluate.text_samples import TextSampler
    from refocused.metrics.meter import Meter
    from refocused.system.logs import ProgressBar
    from refocused.system.world import World
    from refocused.train.step.profile import StepProfiler
    from refocused.train.step.reporter import Reporter
    from refocused.train.step.saver import Saver
    from refocused.train.step.spikes import SpikeWatch
    from refocused.train.step.state import TrainState
    from refocused.train.step.stopping import StopReason, StopRequest


@dataclasses.dataclass(slots=True, kw_only=True)
class Trainer:
    """A run on this rank; `refocused.train.lifecycle.trainer` builds it once.

    Parts that read its settings and use its other parts are made with it, and added to it.
    """

    config: RunConfig  # what was asked, with every `auto` decided for the hardware
    shape: ModelShape
    plan: BatchPlan  # of a step
    world: World
    folder: Path  # of the run
    catalog: Callable[[], Catalog]  # lists the run's checkpoints, local and remote
    stop: StopRequest
    engine: Engine
    data: DataParts
    rates: RatePlan
    cadence: Cadence
    meter: Meter
    byte_lengths: Tensor | None = None  # of each id `[V]`, on the device; None: unknown
    tasks: Sequence[EncodedTask] = ()  # tasks to evaluate, the same on every rank
    sampler: TextSampler | None = None  # writes text samples; None if the run has no prompt
    profiler: StepProfiler | None = None  # None on other ranks and without `--profile`
    bar: ProgressBar | None = None  # None without a terminal
    reporter: Reporter = dataclasses.field(init=False)
    spikes: SpikeWatch = dataclasses.field(init=False)
    saver: Saver = dataclasses.field(init=False)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.run.total_steps


def train(trainer: Trainer, state: TrainState) -> tuple[TrainState, StopReason]:
    """Train to the run's last step, or until every rank agrees to stop; return why, and the state.

    Raises:
        RefocusedError: On every rank alike: bad data, a non-finite loss, saves that keep failing.
        SpikeError: On every rank alike: the run should go back to before a spike.
    """
    world, stop, loader = trainer.world, trainer.stop, trainer.data.loader
    reporter, saver, cadence = trainer.reporter, trainer.saver, trainer.cadence
    stopping, taken = stop.agreed(), None
    accumulation = trainer.plan.gradient_accumulation_steps
    losses: list[Tensor] = []  # of the steps since the last log line, on the device
    finite = FiniteSteps(world, trainer.spikes, overflows=trainer.engine.loss_scale() is not None)
    if trainer.bar is not None:
        trainer.bar.show(state.step)
    if not stopping:
        state = evaluate_at_start(trainer, state)
        stopping = stop.agreed()
    with (
        Garbage() as garbage,
        saver.finishing(),
        contextlib.closing(loader.batches_from(state.position, made=state.step)) as batches,
    ):
        while state.step < trainer.total_steps and not stopping:
            micro_batches = fetch_together(world, batches.next_step, stop)
            if micro_batches is None:
                finite.settle()
                if losses:
                    state = reporter.step(state, losses, batches.wait_seconds)
                if taken is not None:
                    state = saver.save(state, (SaveReason.EMERGENCY,))
                return state, stop.agreed()
            with explaining_lack_of_memory(trainer.plan, step=state.step + 1, world=world):
                taken = take_step(trainer, micro_batches, state, after=batches.position)
            finite.add(taken)
            losses.append(taken.losses)
            garbage.step()
            epoch = state.position.epoch
            state = state.after_step(trainer.plan, batches.position)
            trainer.meter.lap("step", work=len(micro_batches) / accumulation)
            if trainer.bar is not None:
                trainer.bar.show(state.step)
            if trainer.profiler is not None:
                trainer.profiler.after_step(batches.wait_seconds)
            stopping = stop.agreed()
            saver.commit()
            last = state.step == trainer.total_steps
            if last or cadence.due("log", state.step) or stopping:
                finite.settle()
                state = reporter.step(state, losses, batches.wait_seconds)
                losses.clear()
                garbage.collect()
                saver.mirror.watch()
            if not stopping and (last or cadence.evaluation_due(state.step)):
                _settle_step(trainer, finite)
                state = evaluate(trainer, state)
                stopping = stop.agreed()
            due = {
                SaveReason.ROLLING: cadence.due("checkpoint", state.step),
                SaveReason.EPOCH: cadence.keep_epochs and state.position.epoch > epoch,
                SaveReason.FINAL: last,
                SaveReason.BEST: cadence.save_best and state.best_step == state.step,
            }
            reasons = [reason for reason, is_due in due.items() if is_due]
            if reasons or stopping:
                _settle_step(trainer, finite)
                reasons = reasons or [SaveReason.EMERGENCY]
                state = saver.save(state, reasons, wait=last or bool(stopping))
    return state, stopping


def take_step(
    trainer: Trainer, batches: list[Batch], state: TrainState, after: Position
) -> StepTaken:
    """Make a step on the sequences up to the position `after`, without waiting for the device."""
    engine, step = trainer.engine, state.step + 1
    weights = label_weights(trainer.world, [batch.counted_labels for batch in batches])
    trainer.world.progress.step(step)
    engine.begin_step(len(batches))
    losses = [
        engine.accumulate(batch.input_ids, batch.labels, weight=weight)
        for batch, weight in zip(batches, weights, strict=True)
    ]
    if trainer.cadence.due("histograms", step):
        trainer.reporter.histograms(step, engine.histograms())
    each = torch.stack(losses)
    judge = Judge(each.mean(), trainer.spikes.limits(step))
    outcome = engine.update(
        trainer.rates.at(state.step),
        judge,
        momentum=trainer.rates.momentum_at(state.step),
        decay_share=trainer.rates.decay_share_at(state.step),
    )
    return StepTaken(step, each, outcome, batches, state.position, after)


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


def _settle_step(trainer: Trainer, finite: FiniteSteps) -> None:
    """Wait for the last step, and book its time before a validation or a save begins."""
    finite.settle()
    trainer.meter.lap("step", continued=True)
