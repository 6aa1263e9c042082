"""The loss of the first weights, which shows whether they were initialised as they should be."""

import math

import torch

from refocused.system.errors import TrainingError
from refocused.train.step.loop import Parts

FIRST_LOSS_TOLERANCE = 0.3  # nats; a right initialisation lands within 0.1 of the formula


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
