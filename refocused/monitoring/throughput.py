"""How fast the run is and when it will end, from this session's own steps."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Literal, get_args

from refocused.monitoring.pace import RECENT, WARM_UP_STEPS, Pace, median

Activity = Literal["start_up", "step", "validation", "tasks", "sample", "save", "ending"]


class Throughput:
    """Splits the session's time into steps and what comes between them.

    The first steps compile, allocate and fill caches; they are left out of the median as soon as
    there are later ones.

    Attributes:
        laps: Seconds of each activity so far.
    """

    def __init__(self, clock: Callable[[], float], *, began_seconds: float | None = None) -> None:
        """Start the first lap.

        Args:
            clock: Monotonic seconds.
            began_seconds: When the session began, by that clock; None: now.
        """
        self._clock = clock
        self._started = self._last = clock() if began_seconds is None else began_seconds
        self._steps: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._count = 0
        self._others: dict[Activity, list[float]] = {
            "validation": [],
            "tasks": [],
            "sample": [],
            "save": [],
        }
        self.laps: dict[Activity, float] = dict.fromkeys(get_args(Activity), 0.0)

    def lap(self, activity: Activity, *, continued: bool = False) -> float:
        """Book the time since the last call on an activity; return it in seconds.

        Args:
            activity: What it was spent on.
            continued: It belongs to the last step, validation or save, and is not another one.
        """
        now = self._clock()
        seconds, self._last = now - self._last, now
        self.laps[activity] += seconds
        if continued:
            (self._steps if activity == "step" else self._others[activity])[-1] += seconds
        elif activity == "step":
            self._count += 1
            if self._count == WARM_UP_STEPS + 1:
                self._steps.clear()
            self._steps.append(seconds)
        elif activity in self._others:
            self._others[activity].append(seconds)
        return seconds

    @property
    def session_seconds(self) -> float:
        """Time since the session began."""
        return self._clock() - self._started

    @property
    def step_seconds(self) -> float | None:
        """The median of the last steps; None before the first."""
        return median(self._steps)

    def seconds_left(
        self, *, steps: int, validations: int, saves: int, tasks: int = 0, samples: int = 0
    ) -> float | None:
        """Return the time that so many of each will take; None: unknown."""
        pace = Pace(
            step_seconds=self.step_seconds,
            validation_seconds=median(self._others["validation"]),
            save_seconds=median(self._others["save"]),
            tasks_seconds=median(self._others["tasks"]),
            sample_seconds=median(self._others["sample"]),
        )
        return pace.seconds_left(
            steps=steps, validations=validations, saves=saves, tasks=tasks, samples=samples
        )
