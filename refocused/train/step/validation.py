"""Validation: the mean loss over the same windows every time."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator

import torch

from refocused.data.loader.batch import Batch
from refocused.data.loader.prefetch import ReadAhead
from refocused.system.errors import TrainingError
from refocused.train.step.guards import fetch_together
from refocused.train.step.loss_check import SavedLoss, measure_windows
from refocused.train.step.loss_sums import LossSums, ValidationLoss
from refocused.train.step.parts import Parts
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopRequest

BATCHES_READY = 2
FIRST_LOSS_TOLERANCE = 0.3  # nats; a right initialisation lands within 0.1 of the formula


def validate(parts: Parts, state: TrainState, stop: StopRequest) -> TrainState:
    """Measure and report the validation loss; a state without one when a stop cuts it short."""
    loss = validation_loss(parts, stop)
    seconds = parts.throughput.lap("validation")
    if loss is None:
        return state
    state = state.after_validation(loss.mean)
    parts.reporter.validation(state, seconds, loss.by_source)
    return state


def validation_loss(parts: Parts, stop: StopRequest) -> ValidationLoss | None:
    """Return the losses over all ranks; None without data or when asked to stop."""
    losses = LossSums()
    with contextlib.closing(ReadAhead(_one_by_one(parts), ready=BATCHES_READY)) as ahead:
        while batches := fetch_together(parts.world, ahead.take, stop):
            (batch,) = batches
            losses.add(batch, parts.engine.validation_loss(batch.input_ids, batch.labels))
            if stop.agreed():
                return None
    return None if batches is None else losses.mean(parts.world)


def _one_by_one(parts: Parts) -> Iterator[list[Batch]]:
    """Yield each validation batch, and nothing in the end."""
    yield from ([batch] for batch in parts.validation_batches())
    yield []


def check_first_loss(parts: Parts) -> float:
    """Return the untrained model's loss on random tokens.

    Random, because in real text the next token is often the same again, which a tied head finds
    likely even before it has learned anything.

    Raises:
        TrainingError: It is far from `untrained_loss`: the weights are not initialised
            as they should be. Nothing trained from there could be trusted.
    """
    generator = torch.Generator().manual_seed(parts.world.rank)
    tokens = torch.randint(
        parts.vocabulary_rows, (1, parts.plan.sequence_length + 1), generator=generator
    )
    mine = parts.engine.validation_loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loss = parts.world.total([float(mine)])[0] / parts.world.world_size
    if not abs(loss - parts.untrained_loss) <= FIRST_LOSS_TOLERANCE:
        raise TrainingError(
            f"The untrained model's loss on random tokens is {loss:.3f}; with ln(V) = "
            f"{math.log(parts.vocabulary_rows):.3f} it should be {parts.untrained_loss:.3f} within "
            f"{FIRST_LOSS_TOLERANCE}. The weights are not initialised as they should be; nothing "
            "was trained. Check initializer_range in the model's JSON."
        )
    return loss


def check_resumed_loss(parts: Parts, saved: SavedLoss | None, *, allowed: bool) -> None:
    """Compare the loss of the loaded model with the saved one; every rank must call.

    Args:
        parts: The run's parts.
        saved: What the checkpoint records.
        allowed: Whether the user has allowed a change of the model, the data or the precision.

    Raises:
        TrainingError: On every rank: a trained model was saved, and an untrained one was loaded.
    """
    if saved is None:
        return
    shape = parts.plan.micro, parts.plan.sequence_length
    measured = statistics.fmean(measure_windows(parts.engine, saved.windows, shape=shape))
    loss = parts.world.broadcast(measured)
    facts = {"loss": loss, "saved_loss": saved.mean, "tolerance": saved.tolerance}
    if abs(loss - saved.mean) <= saved.tolerance:
        text = f"  loss     {loss:.4f} on windows of the saved step, {saved.mean:.4f} at the save"
        parts.reporter.event("resumed_loss", text, **facts)
        return
    text = (
        f"The loaded model has a loss of {loss:.3f} on windows of the saved step; at the save it "
        f"was {saved.mean:.3f}, and +-{saved.tolerance:.3f} is usual."
    )
    least = parts.untrained_loss - FIRST_LOSS_TOLERANCE
    if not allowed and saved.mean < least and not loss < least:
        error = TrainingError(
            f"{text} An untrained model has about {parts.untrained_loss:.3f}: the trained weights "
            "were not loaded. Nothing was changed. Resume from another checkpoint (--resume STEP)."
        )
        error.on_every_rank = True
        raise error
    parts.reporter.event("resumed_loss_warning", text, **facts)
