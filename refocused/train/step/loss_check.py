"""Losses that show whether the right weights were initialised, saved and loaded."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pydantic
import torch

from refocused.data.loader.batch import IGNORED_LABEL
from refocused.system.errors import TrainingError

if TYPE_CHECKING:
    from refocused.engine.engine import Engine
    from refocused.system.world import World
    from refocused.train.step.loop import Parts

FIRST_LOSS_TOLERANCE = 0.3  # nats; a right initialisation lands within 0.1 of the formula
MOST_WINDOWS = 4
MOST_TOKENS = 1024  # of all windows, which are stored in trainer.json
LEAST_TOLERANCE = 0.05  # nats; another precision or device moves the mean by less than 0.01


class SavedLoss(pydantic.BaseModel, frozen=True, extra="forbid"):
    """A checkpoint's loss on some of its training windows, stored in `trainer.json`.

    The windows are stored with it, so that the comparison depends neither on the data nor on the
    number of ranks, and needs no shard.
    """

    windows: tuple[tuple[int, ...], ...] = pydantic.Field(min_length=1)  # token ids, equally long
    losses: tuple[float, ...] = pydantic.Field(min_length=1)  # mean of each window, in nats a token

    @property
    def mean(self) -> float:
        """Mean over the windows."""
        return statistics.fmean(self.losses)

    @property
    def tolerance(self) -> float:
        """Standard error of the mean over the windows."""
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
    losses = _measure_windows(engine, windows, shape=tuple(engine.last_batch.shape))
    if not losses or not math.isfinite(sum(losses)):
        return None
    return SavedLoss(windows=tuple(map(tuple, windows)), losses=tuple(losses))


def _measure_windows(
    engine: Engine, windows: Sequence[Sequence[int]], *, shape: tuple[int, ...]
) -> list[float]:
    """Return each window's mean loss; `shape` is a validation's, whose compiled graph is reused."""
    losses = []
    for window in windows:
        length = len(window) - 1
        ids = torch.zeros(shape[0], max(shape[1], length), dtype=torch.long)
        labels = torch.full_like(ids, IGNORED_LABEL)
        ids[0, :length], labels[0, :length] = torch.tensor([window[:-1], window[1:]])
        losses.append(float(engine.validation_loss(ids, labels)))
    return losses


def check_first_loss(parts: Parts) -> float:
    """Return the untrained model's loss on random tokens.

    Random, because in real text the next token is often the same again, which a tied head finds
    likely before it has learned anything.

    Raises:
        TrainingError: It is far from `untrained_loss`: the weights are initialised wrongly.
    """
    loss = loss_on_random_tokens(parts, ids=parts.vocabulary_rows)
    if not abs(loss - parts.untrained_loss) <= FIRST_LOSS_TOLERANCE:
        raise TrainingError(
            f"The untrained model's loss on random tokens is {loss:.3f}; with ln(V) = "
            f"{math.log(parts.vocabulary_rows):.3f} it should be {parts.untrained_loss:.3f} within "
            f"{FIRST_LOSS_TOLERANCE}. The weights are not initialised as they should be; nothing "
            "was trained. Check initializer_range in the model's JSON."
        )
    return loss


def loss_on_random_tokens(parts: Parts, *, ids: int | None = None) -> float:
    """Return the mean over all ranks; tokens are below `ids` (None: those of the vocabulary)."""
    seed = parts.world.rank // parts.plan.sequence_parallel
    generator = torch.Generator().manual_seed(seed)
    shape = 1, parts.plan.sequence_length + 1
    tokens = torch.randint(ids or parts.vocabulary, shape, generator=generator)
    mine = parts.engine.validation_loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return parts.world.total([float(mine)])[0] / parts.world.world_size


def check_resumed_loss(parts: Parts) -> None:
    """Compare the loaded model's loss with the saved one; every rank must call.

    Raises:
        TrainingError: On every rank: a trained model was saved, and an untrained one was loaded,
            although the user allowed no change of the model, the data or the precision.
    """
    saved = parts.saver.loaded_loss
    if saved is None:
        return
    shape = parts.plan.micro, parts.plan.sequence_length
    measured = statistics.fmean(_measure_windows(parts.engine, saved.windows, shape=shape))
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
    if not parts.saver.loaded_changed and saved.mean < least and not loss < least:
        raise TrainingError(
            f"{text} An untrained model has about {parts.untrained_loss:.3f}: the trained weights "
            "were not loaded. Nothing was changed. Resume from another checkpoint (--resume STEP)."
        ).agreed()
    parts.reporter.event("resumed_loss_warning", text, **facts)
