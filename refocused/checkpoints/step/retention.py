"""Which steps may go, here or in a bucket: a pure function of what is known about each of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from refocused.checkpoints.step.tiers import SaveReason

FEWEST = 2
EMERGENCIES = 1
_ALWAYS = {SaveReason.EPOCH, SaveReason.FINAL}


@dataclasses.dataclass(frozen=True, slots=True)
class KeptStep:
    """What retention has to know about one step in one place.

    Attributes:
        step: Optimizer updates done.
        verified: Its manifest can be read and its files have their sizes; a step that is not
            verified never counts among those kept.
        tiers: Why it was saved.
        mirrored: The bucket holds all of it, with its marker; None: no copy of it is wanted.
        skipped: The mirror puts newer steps first.
        best: It has the lowest validation loss.
        in_use: Something is reading it: a resume, an export, an upload.
    """

    step: int
    verified: bool
    tiers: frozenset[SaveReason] = frozenset({SaveReason.ROLLING})
    mirrored: bool | None = None
    skipped: bool = False
    best: bool = False
    in_use: bool = False


def to_remove(steps: Sequence[KeptStep], *, keep: int, disk_low: bool = False) -> list[int]:
    """Choose the steps to remove, oldest first.

    Kept are the newest two verified steps, the newest `keep` verified rolling ones, the newest
    verified emergency, every epoch's and the final one, the best, what is in use, what a mirror
    still has to copy, and broken steps newer than the oldest that is kept by its number. On a full
    disk a step goes before the mirror has it, if the mirror has a newer one, or puts newer ones
    first.

    Args:
        steps: All steps of one run in one place, in any order.
        keep: How many of the newest verified rolling ones stay.
        disk_low: There may be no room for the next saves.
    """
    verified = sorted((step for step in steps if step.verified), key=lambda step: -step.step)
    if len(verified) < FEWEST:
        return []  # a broken step may still be what a person can rescue something from
    rolling = [step for step in verified if SaveReason.ROLLING in step.tiers][:keep]
    emergencies = [step for step in verified if SaveReason.EMERGENCY in step.tiers][:EMERGENCIES]
    kept = {step.step for step in (*verified[:FEWEST], *rolling, *emergencies)}
    oldest = min(step.step for step in (*verified[:FEWEST], *rolling))
    newest_mirrored = max((step.step for step in verified if step.mirrored), default=-1)
    return sorted(
        step.step
        for step in steps
        if step.step not in kept
        and (step.verified or step.step < oldest)
        and not (step.best or step.in_use or step.tiers & _ALWAYS)
        and (
            step.mirrored is not False
            or (disk_low and (step.skipped or step.step < newest_mirrored))
        )
    )


def best_of(losses: Mapping[int, float | None]) -> int | None:
    """Return the step with the lowest validation loss; None: no step has one that is finite.

    Of several with the same loss it is the first, which is nearest to where that was measured.
    """
    finite = {
        step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)
    }
    return min(finite, key=lambda step: (finite[step], step)) if finite else None
