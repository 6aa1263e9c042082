"""How long a run may say nothing: one rule for the alarm and for the word on the screen."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

LATE_MEDIANS = 5
SHORTEST_WAIT_SECONDS = 120.0  # a validation and a save may lie between two log lines
FIRST_STEP_SECONDS = 1800.0  # which compiles, and waits for the first shards


@dataclasses.dataclass(frozen=True, slots=True)
class Silence:
    """The time since the last logged step.

    Attributes:
        seconds: How long it is.
        longest_seconds: How long it may be.
    """

    seconds: float
    longest_seconds: float

    @property
    def is_too_long(self) -> bool:
        """Whether the next step is late."""
        return self.seconds > self.longest_seconds


def silence(logged: Sequence[float], *, began: float, now: float) -> Silence:
    """Return the silence of a run that trains.

    Args:
        logged: When steps of this session were logged, ascending, in Unix seconds.
        began: Since when a first step is waited for, where there is none.
        now: In Unix seconds.
    """
    return Silence(max(0.0, now - (logged[-1] if logged else began)), longest_seconds(logged))


def longest_seconds(logged: Sequence[float]) -> float:
    """Return how long after the last logged step the next one is late; arguments as above."""
    gaps = [after - before for before, after in itertools.pairwise(logged)]
    if len(gaps) < 3:
        return FIRST_STEP_SECONDS
    return max(LATE_MEDIANS * statistics.median(gaps), 1.5 * max(gaps), SHORTEST_WAIT_SECONDS)
