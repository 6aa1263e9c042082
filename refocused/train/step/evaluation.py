"""Evaluation between steps: validation loss, tasks and text samples, each when it is due."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from refocused.data.loader.loader import ReadAhead
from refocused.evaluate.continuations import (
    Continuation,
    LossSums,
    ValidationLoss,
    score_all,
    tensors_of,
)
from refocused.train.step.guards import fetch_together

if TYPE_CHECKING:
    from refocused.data.loader.batch import Batch
    from refocused.train.step.loop import Trainer
    from refocused.train.step.state import TrainState

BATCHES_READY = 2


def evaluate(trainer: Trainer, state: TrainState) -> TrainState:
    """Measure what is due after a step, and everything after the last; a stop cuts it short.

    Tasks and samples do not decide which step is the best.
    """
    last = state.step == trainer.total_steps
    with trainer.world.progress.doing("validation"):
        if last or trainer.cadence.due("validation", state.step):
            state = _validate(trainer, state)
        state = _evaluate_tasks(trainer, state)
        if not last and trainer.cadence.due("sample", state.step):  # the last one comes at the end
            _write_sample(trainer, state)
    return state


def evaluate_at_start(trainer: Trainer, state: TrainState) -> TrainState:
    """Measure what is due before the first step, or what a stop left out after a saved step.

    Before the first step a sample is written, and with `evaluation.at_start` validation and tasks
    give the baseline, which is never the best: there is no checkpoint of it.

    A validation is also made if the checkpoint's was of another set, so that there is a best one of
    the present set. The marker of the checkpoint gets the loss, which may be the best.
    """
    with trainer.world.progress.doing("validation"):
        if not state.step:
            if trainer.config.evaluation.at_start:
                state = _evaluate_tasks(trainer, _validate(trainer, state))
            _write_sample(trainer, state)
            return state
        due = state.step == trainer.total_steps or trainer.cadence.due("validation", state.step)
        sets = {state.validation_set or trainer.data.validation_set, trainer.data.validation_set}
        has_changed = bool(
            trainer.cadence.validation and trainer.data.validation_set and len(sets) > 1
        )
        if has_changed:
            trainer.reporter.event(
                "validation_set",
                "  best     the validation set has changed: losses are not compared with the best "
                f"so far, {state.best_loss} at step {state.best_step}",
            )
        if has_changed or (due and state.validation_step != state.step):
            state = _validate(trainer, state)
            trainer.saver.record_validation(state)
        return state if state.tasks_step == state.step else _evaluate_tasks(trainer, state)


def _write_sample(trainer: Trainer, state: TrainState) -> None:
    if trainer.sampler is not None and not trainer.stop.agreed():
        text = trainer.sampler.write(trainer.engine, stopping=trainer.stop.agreed)
        seconds = trainer.meter.lap("sample")
        if text is not None:
            trainer.reporter.sample(state, text, seconds)


def _validate(trainer: Trainer, state: TrainState) -> TrainState:
    loss = validation_loss(trainer)
    seconds = trainer.meter.lap("validation")
    if loss is None:
        return state
    state = state.after_validation(loss.mean, loss.bits_per_byte, of=trainer.data.validation_set)
    trainer.reporter.validation(state, seconds, loss.by_source)
    return state


def validation_loss(trainer: Trainer) -> ValidationLoss | None:
    """Return the losses over all ranks; None without data or when asked to stop."""

    def batch_by_batch() -> Iterator[list[Batch]]:
        yield from ([batch] for batch in trainer.data.validation_batches())
        yield []

    losses = LossSums(trainer.byte_lengths)
    with contextlib.closing(ReadAhead(batch_by_batch(), ready=BATCHES_READY)) as ahead:
        while batches := fetch_together(trainer.world, ahead.take, trainer.stop):
            (batch,) = batches
            losses.add(batch.source, *trainer.engine.label_losses(batch.input_ids, batch.labels))
            if trainer.stop.agreed():
                return None
    return None if batches is None else losses.mean(trainer.world)


def _evaluate_tasks(trainer: Trainer, state: TrainState) -> TrainState:
    plan = trainer.plan
    due = state.step in (0, trainer.total_steps) or trainer.cadence.due("tasks", state.step)
    if not (trainer.tasks and due) or trainer.stop.agreed():
        return state

    def score(batch: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
        return trainer.engine.label_scores(*tensors_of(batch), vocabulary=trainer.shape.vocabulary)

    results = []
    for task in trainer.tasks:
        scored = score_all(
            task.continuations,
            score,
            rows=len(task.continuations),
            tokens=plan.micro_batch_size * plan.sequence_length,  # at most a training batch's
            world=trainer.world,
            stopping=lambda: bool(trainer.stop.agreed()),
        )
        if scored is None:
            trainer.meter.lap("tasks")
            return state
        results.append(task.result(scored))
    state = dataclasses.replace(state, tasks_step=state.step)
    trainer.reporter.tasks(state, results, trainer.meter.lap("tasks"))
    return state
