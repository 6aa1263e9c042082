"""Compare the phases of the ranks' steps, and find the rank that the others wait for.

All ranks of a synchronous step end it together, so its time shows none of them. What differs is how
long each rank works before it waits for the others: the slow rank works longest and waits least.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import numpy as np

Phase = Literal["data", "forward", "backward", "update", "wait"]
PHASES: tuple[Phase, ...] = get_args(Phase)
OWN = PHASES[:-1]  # a rank's own work
Row = list[float]  # seconds of each phase in one step

WINDOW = 10  # measured steps that are judged, the last 40: a slow rank is named within 50
HISTORY = 60  # measured steps that the noise is estimated from
# Interruptions only lengthen steps: a low quantile has less noise than the median, and still shows
# a rank that is slow in three steps of four.
QUANTILE = 0.3
# A smaller difference is not worth a new machine. Ranks that are alike differ by less.
LEAST_EXCESS = 0.06
# The difference of two such quantiles of 10 normal values has 0.6 of their standard deviation, so
# that 2.5 are 4 of its own, exceeded once in 30,000 comparisons.
EXCESS_DEVIATIONS = 2.5
DEVIATION = 1.4826  # times the median absolute deviation of a normal distribution: a standard one


@dataclasses.dataclass(frozen=True, slots=True)
class SlowestRank:
    """The rank that works longest in a step."""

    rank: int  # of all ranks
    excess_fraction: float  # of its work beyond that of the median rank
    limit_fraction: float  # from which on it counts as slow: 0.06, or more if the ranks' times vary
    phase: str  # with the largest part of the excess: data, forward, backward or update
    host: str = ""  # the name of its machine
    local_rank: int = 0  # its index on that machine

    @property
    def is_slow(self) -> bool:
        """Whether the others wait for it in each step, beyond the noise."""
        return self.excess_fraction >= self.limit_fraction

    @property
    def place(self) -> str:
        """The rank and its machine, for messages."""
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else "")


def find_slowest(seconds: np.ndarray) -> SlowestRank | None:
    """Find the rank that works longest, by a low quantile of its last measured steps.

    Its work is compared with the lower median of all ranks: of two ranks the faster one, and a fast
    one even if half of the ranks are slow. The noise is estimated from the changes between
    successive steps: a rank that has become slow does not hide in it. Changes that all ranks share,
    such as those of the batch, are no noise.

    Args:
        seconds: Phases of measured steps `[steps, ranks, phases]` in seconds, in order.

    Returns:
        None for a single rank, and before there are `WINDOW` steps.
    """
    import numpy as np  # the screen reads this file without it

    if len(seconds) < WINDOW or seconds.shape[1] < 2:
        return None
    work = seconds[..., : len(OWN)].sum(axis=-1)
    if not work.all():
        return None
    usual = np.quantile(work[-WINDOW:], QUANTILE, axis=0)
    slowest = int(usual.argmax())
    differences = np.log(work) - np.log(np.roll(work, 1, axis=1))  # between two ranks each
    changes = np.abs(np.diff(differences, axis=0))  # of four values, so twice one's deviation
    noise = DEVIATION * float(np.median(changes)) / 2
    phases = np.median(seconds[-WINDOW:, :, : len(OWN)], axis=0)
    beyond = phases[slowest] - np.median(phases, axis=0)
    return SlowestRank(
        slowest,
        excess_fraction=round(float(usual[slowest]) / statistics.median_low(usual.tolist()) - 1, 4),
        limit_fraction=round(max(LEAST_EXCESS, EXCESS_DEVIATIONS * noise), 4),
        phase=OWN[int(beyond.argmax())],
    )


class RankTimes:
    """The last measured steps of all ranks; rank 0 keeps them."""

    def __init__(self) -> None:
        self._steps: collections.deque[Sequence[Row]] = collections.deque(maxlen=HISTORY)

    def add(
        self, rows: Sequence[Sequence[Row]], places: Sequence[tuple[str, int]]
    ) -> tuple[SlowestRank | None, dict[str, list[float]]]:
        """Take the new rows of each rank; return the slowest rank, and the ranks' mean times.

        `places` are host and local rank of each rank. The times are those of each phase by rank;
        none if no step was measured since the last call.
        """
        import numpy as np

        new = list(zip(*rows, strict=True))
        self._steps.extend(new)
        slowest = find_slowest(np.array(self._steps)) if self._steps else None
        if slowest is not None:
            host, local_rank = places[slowest.rank]
            slowest = dataclasses.replace(slowest, host=host, local_rank=local_rank)
        if not new:
            return slowest, {}
        data, forward, backward, update, wait = np.mean(new, axis=0).T.round(4).tolist()
        return slowest, {
            "ranks_data_seconds": data,  # of each rank in a step, until it had its batches
            "ranks_forward_seconds": forward,  # likewise, in forward passes
            "ranks_backward_seconds": backward,  # likewise, in backward passes
            "ranks_update_seconds": update,  # likewise, in the optimizer
            "ranks_wait_seconds": wait,  # likewise, for other ranks; not part of the above
        }
