"""The loop: take steps until all are made or someone asks to stop."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch

from refocused.batches.batch import Batch
from refocused.checkpoints.tiers import Tier
from refocused.engine.schedule import learning_rate
from refocused.errors import TrainingError
from refocused.training.fetching import fetch_together
from refocused.training.out_of_memory import explaining_lack_of_memory
from refocused.training.parts import Parts
from refocused.training.state import TrainState
from refocused.training.stopping import StopReason, StopRequest
from refocused.training.validation import make_up_validation, validate
from refocused.world import World


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How training ended."""

    state: TrainState
    stopped: StopReason


def train(parts: Parts, state: TrainState, stop: StopRequest) -> Outcome:
    """Train from a state to the run's last step, or until every rank agrees to stop.

    Raises:
        RefocusedError: On every rank alike: bad data, a non-finite loss, saves that keep failing.
    """
    stopping, loss = stop.agreed(), None
    if state.step and not stopping:
        state = make_up_validation(parts, state, stop)
        stopping = stop.agreed()
    with (
        parts.saver.finishing(),
        contextlib.closing(parts.loader.batches_from(state.position)) as batches,
    ):
        while state.step < parts.total_steps and not stopping:
            micro_batches = fetch_together(parts.world, batches.next_step, stop)
            if micro_batches is None:
                state = save_where_it_waited(parts, state, loss, batches.wait_seconds)
                return Outcome(state, stop.agreed())
            with explaining_lack_of_memory(parts.plan, step=state.step + 1, world=parts.world):
                loss = take_step(parts, micro_batches, state)
            epoch = state.position.epoch
            state = state.after_step(parts.plan, batches.position)
            parts.throughput.lap("step")
            stopping = stop.agreed()
            parts.saver.commit()
            last = state.step == parts.total_steps
            if last or parts.cadence.log_due(state.step) or stopping:
                state = parts.reporter.step(state, loss, batches.wait_seconds)
                parts.saver.watch_mirror()
            if not stopping and (last or parts.cadence.validation_due(state.step)):
                state = validate(parts, state, stop)
                stopping = stop.agreed()
            tiers = parts.cadence.reasons_to_save(
                state.step,
                last=last,
                epoch_ended=state.position.epoch > epoch,
                stopping=bool(stopping),
            )
            if tiers:
                state = parts.saver.save(state, tiers, wait=last or bool(stopping))
    return Outcome(state, stopping)


def take_step(parts: Parts, micro_batches: list[Batch], state: TrainState) -> torch.Tensor:
    """Make one optimizer step; return this rank's mean loss `[]`, still on the device."""
    weights = label_weights(parts.world, [batch.counted_labels for batch in micro_batches])
    losses = [
        parts.engine.accumulate(batch.input_ids, batch.labels, weight=weight)
        for batch, weight in zip(micro_batches, weights, strict=True)
    ]
    loss = torch.stack(losses).mean()
    stop_unless_finite(parts, loss, micro_batches, state.step + 1)
    parts.engine.update(
        learning_rate(
            state.step,
            peak=parts.optimizer.lr,
            total_steps=parts.total_steps,
            schedule=parts.schedule,
        )
    )
    return loss


def label_weights(world: World, counted: Sequence[int | None]) -> list[float]:
    """Return the factors of the micro-batches' mean losses that let every label count the same.

    The step's loss is the mean of the mean losses of all micro-batches of all ranks, in which a
    label among few would count more than one among many.

    Args:
        world: The ranks; where labels are ignored, every rank must call.
        counted: Labels of each micro-batch of this rank; None: no label is ignored anywhere.
    """
    known = [labels for labels in counted if labels is not None]
    if not known:
        return [1.0] * len(counted)
    mean = world.total([sum(known)])[0] / (len(known) * world.world_size)
    return [labels / mean if mean else 1.0 for labels in known]


def save_where_it_waited(
    parts: Parts, state: TrainState, loss: torch.Tensor | None, waited_seconds: float
) -> TrainState:
    """Report and save the last finished step, when training stops before the next one's data.

    Args:
        parts: The run's parts.
        state: After that step.
        loss: Of that step; None when this session has made none: then nothing is to be saved.
        waited_seconds: Time that batches were waited for, in all.
    """
    if loss is None:
        return state
    if not parts.cadence.log_due(state.step):
        state = parts.reporter.step(state, loss, waited_seconds)
    return parts.saver.save(state, (Tier.EMERGENCY,))


def stop_unless_finite(
    parts: Parts, loss: torch.Tensor, micro_batches: list[Batch], step: int
) -> None:
    """Raise on every rank, before the update, when a rank's loss is NaN or infinite."""
    finite = bool(torch.isfinite(loss))
    if any(parts.world.largest([not finite])):
        windows = "; ".join(batch.describe() for batch in micro_batches)
        error = TrainingError(
            f"Loss is not finite on rank {parts.world.rank} at step {step:,} ({windows}). Stopped "
            "before the optimizer step. The last checkpoint is good: resume with a lower "
            "optimizer.lr, or leave the named file out with data.exclude."
        )
        parts.world.raise_together(None if finite else error)
