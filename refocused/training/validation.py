"""Validation: the mean loss over the same windows every time."""

from __future__ import annotations

import math

import torch

from refocused.batches.batch import IGNORED_LABEL
from refocused.errors import TrainingError
from refocused.training.parts import Parts
from refocused.training.state import TrainState
from refocused.training.stopping import StopRequest

FIRST_LOSS_TOLERANCE = 0.3  # nats; a right initialisation lands within 0.1


def validate(parts: Parts, state: TrainState, stop: StopRequest) -> TrainState:
    """Measure and report the validation loss; a state without one when a stop cuts it short."""
    loss = validation_loss(parts, stop)
    seconds = parts.throughput.lap("validation")
    if loss is None:
        return state
    state = state.after_validation(loss)
    parts.reporter.validation(state, seconds)
    return state


def validation_loss(parts: Parts, stop: StopRequest) -> float | None:
    """Return the mean loss a token over all ranks; None without data or when asked to stop."""
    total = tokens = 0.0
    batches = iter(parts.validation_batches())
    # A rank that failed alone to read would leave the others inside a collective.
    while (batch := parts.world.together(lambda: next(batches, None))) is not None:
        loss = parts.engine.validation_loss(batch.input_ids, batch.labels)
        counted = int((batch.labels != IGNORED_LABEL).sum())
        total += float(loss) * counted
        tokens += counted
        if stop.agreed():
            return None
    total, tokens = parts.world.total([total, tokens])
    return total / tokens if tokens else None


def check_first_loss(parts: Parts) -> float:
    """Return the untrained model's loss on random tokens.

    Random, because in real text the next token is often the same again, which a tied head finds
    likely even before it has learned anything.

    Raises:
        TrainingError: It is far from ln(V): the weights are not initialised as they should be.
            Nothing trained from there could be trusted.
    """
    generator = torch.Generator().manual_seed(parts.world.rank)
    tokens = torch.randint(
        parts.vocabulary_rows, (1, parts.plan.sequence_length + 1), generator=generator
    )
    mine = parts.engine.validation_loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    loss = parts.world.total([float(mine)])[0] / parts.world.world_size
    expected = math.log(parts.vocabulary_rows)
    if not abs(loss - expected) <= FIRST_LOSS_TOLERANCE:
        raise TrainingError(
            f"The untrained model's loss on random tokens is {loss:.3f}; it should be ln(V) = "
            f"{expected:.3f} within {FIRST_LOSS_TOLERANCE}. The weights are not initialised as "
            "they should be; nothing was trained. Check initializer_range in the model's JSON."
        )
    return loss
