"""Which step the mirror copies next, and which it puts back: a pure function."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from refocused.checkpoints.retention import KeptStep
from refocused.checkpoints.tiers import Tier

MOST_BEHIND = 2


@dataclasses.dataclass(frozen=True, slots=True)
class CopyOrder:
    """The steps that a bucket lacks.

    Attributes:
        wanted: Those to copy, the next one first.
        skipped: Rolling and emergency saves that newer ones replace: copied when nothing else is to
            be done, and not waited for at the end.
    """

    wanted: tuple[int, ...]
    skipped: tuple[int, ...]


def copy_order(lacking: Sequence[KeptStep]) -> CopyOrder:
    """Put the newest first, since a resume needs it; with more than two behind, skip old ones.

    Args:
        lacking: The local steps that the bucket does not hold, in any order.
    """
    newest_first = sorted(lacking, key=lambda step: -step.step)
    skipped = {
        step.step
        for step in newest_first[MOST_BEHIND:]
        if not (step.best or step.tiers & {Tier.EPOCH, Tier.FINAL})
    }
    return CopyOrder(
        wanted=tuple(step.step for step in newest_first if step.step not in skipped),
        skipped=tuple(step.step for step in newest_first if step.step in skipped),
    )
