"""Record a model's loss at a save, by which a resume sees that it loaded the same model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pydantic
import torch

from refocused.data.loader.batch import IGNORED_LABEL
from refocused.engine.engine import Engine
from refocused.system.errors import CheckpointError
from refocused.system.world import World

MOST_WINDOWS = 4
MOST_TOKENS = 1024  # of all windows, which travel in trainer.json
LEAST_TOLERANCE = 0.05  # nats; another precision or device moves the mean by less than 0.01


class SavedLoss(pydantic.BaseModel):
    """The loss of a checkpoint on some windows that it was trained on, kept in `trainer.json`.

    The windows travel with it, so that the comparison depends neither on the data nor on the
    number of ranks, and needs no shard.

    Attributes:
        windows: Token ids; each but the first of a window is predicted.
        losses: Mean of each window, in nats a token.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    windows: tuple[tuple[int, ...], ...] = pydantic.Field(min_length=1)
    losses: tuple[float, ...] = pydantic.Field(min_length=1)

    @property
    def mean(self) -> float:
        """Of all windows, which are equally long."""
        return statistics.fmean(self.losses)

    @property
    def tolerance(self) -> float:
        """The standard error of the mean over the windows."""
        if len(self.losses) == 1:
            return LEAST_TOLERANCE
        return max(LEAST_TOLERANCE, statistics.stdev(self.losses) / math.sqrt(len(self.losses)))


def measure_saved_loss(engine: Engine, world: World) -> SavedLoss | None:
    """Measure the weights on windows of rank 0's last micro-batch; every rank must call.

    Returns:
        None before the first step, and if a loss is not finite, which JSON cannot hold.
    """
    if engine.last_batch is None:
        return None
    rows = engine.last_batch[:MOST_WINDOWS]
    windows = world.broadcast(rows[:, : MOST_TOKENS // len(rows)].tolist())
    losses = measure_windows(engine, windows, shape=tuple(engine.last_batch.shape))
    if not losses or not math.isfinite(sum(losses)):
        return None
    return SavedLoss(windows=tuple(map(tuple, windows)), losses=tuple(losses))


def measure_windows(
    engine: Engine, windows: Sequence[Sequence[int]], *, shape: tuple[int, ...]
) -> list[float]:
    """Return the mean loss of each window; every rank must call with the same windows.

    Args:
        engine: The model.
        windows: Token ids, of equal lengths.
        shape: Micro-batch and length of a validation, whose compiled graph is used again.
    """
    losses = []
    for window in windows:
        length = len(window) - 1
        ids = torch.zeros(shape[0], max(shape[1], length), dtype=torch.long)
        labels = torch.full_like(ids, IGNORED_LABEL)
        ids[0, :length], labels[0, :length] = torch.tensor([window[:-1], window[1:]])
        losses.append(float(engine.validation_loss(ids, labels)))
    return losses


def read_saved_loss(record: dict[str, Any]) -> SavedLoss | None:
    """Take what a save recorded out of `trainer.json`; earlier versions recorded nothing.

    Raises:
        CheckpointError: It is no such record.
    """
    found = record.pop("saved_loss", None)
    try:
        return None if found is None else SavedLoss.model_validate(found)
    except pydantic.ValidationError as error:
        raise CheckpointError(
            f"The checkpoint's trainer.json has a malformed saved_loss: {error}. Resume from "
            "another checkpoint."
        ) from error
