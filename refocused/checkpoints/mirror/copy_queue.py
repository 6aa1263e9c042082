"""Which step the mirror copies next, and which it puts back: a pure function."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from refocused.checkpoints.step.retention import KeptStep
from refocused.checkpoints.step.tiers import SaveReason

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


def copy_order(
    lacking: Sequence[KeptStep], *, there: Collection[int] = (), copying: int | None = None
) -> CopyOrder:
    """Put the newest first, since a resume needs it, and skip what two newer ones replace.

    Args:
        lacking: The local steps that the bucket does not hold, in any order.
        there: The local steps that it holds.
        copying: The step that is being copied, which is finished: otherwise a mirror that is slower
            than the saves would never finish one.
    """
    newest_first = sorted(lacking, key=lambda step: -step.step)
    newest = sorted({*there, *(step.step for step in lacking)}, reverse=True)[:MOST_BEHIND]
    skipped = {
        step.step
        for step in newest_first
        if step.step not in (*newest, copying)
        and not (step.best or step.tiers & {SaveReason.EPOCH, SaveReason.FINAL})
    }
    first = [step.step for step in newest_first if step.step == copying]
    return CopyOrder(
        wanted=(*first, *(s.step for s in newest_first if s.step not in {*skipped, copying})),
        skipped=tuple(step.step for step in newest_first if step.step in skipped),
    )
