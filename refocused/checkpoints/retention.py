"""Which step directories may go: a pure function of what is known about each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

FEWEST = 2


@dataclasses.dataclass(frozen=True, slots=True)
class KeptStep:
    """What retention has to know about one local step directory.

    Attributes:
        step: Optimizer updates done.
        verified: Its manifest can be read and its files have their sizes; a step that is not
            verified never counts among those kept.
        mirrored: The bucket holds all of it, with its marker; None: the run has no mirror.
        best: It has the lowest validation loss.
        final: It is the end of the run.
        in_use: Something is reading it: a resume, an export, an upload.
    """

    step: int
    verified: bool
    mirrored: bool | None = None
    best: bool = False
    final: bool = False
    in_use: bool = False


def to_remove(steps: Sequence[KeptStep], *, keep: int) -> list[int]:
    """Choose the local step directories to remove, oldest first.

    Kept are the newest `keep` verified steps (never fewer than two), everything newer than the
    oldest of those, the best, the final, what is in use, and what a mirror does not hold yet.

    Args:
        steps: All local steps of one run, in any order.
        keep: How many of the newest verified ones stay.
    """
    verified = sorted((step.step for step in steps if step.verified), reverse=True)
    newest = verified[: max(keep, FEWEST)]
    if len(newest) < FEWEST:
        return []  # a broken step may still be what a person can rescue something from
    return sorted(
        step.step
        for step in steps
        if step.step < newest[-1]
        and not (step.best or step.final or step.in_use)
        and step.mirrored is not False
    )
