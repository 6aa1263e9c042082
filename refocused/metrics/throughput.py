"""How fast a session is and when its run will end, from the time that has passed."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from refocused.config.batch_plan import BatchPlan

Activity = Literal["start_up", "step", "validation", "tasks", "sample", "save", "ending"]

WARM_UP_STEPS = 10  # of each session: they compile, allocate and fill caches
RECENT = 1000  # measurements that a mean is of: those of 50 uneven steps are easily 20 % off


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """What activities probably take until they are measured, as multiples of a step's time.

    Attributes:
        validation: Of a validation.
        tasks: Of putting all tasks once.
        sample: Of a text sample.
        exports: Whether a process makes the final model at the end. It starts about as long as
            this session did.
    """

    validation: float = 0.0
    tasks: float = 0.0
    sample: float = 0.0
    exports: bool = False


def forecast(
    plan: BatchPlan,
    *,
    validation_windows: int,
    task_tokens: int,
    sample_tokens: int,
    exports: bool,
) -> Forecast:
    """Forecast from the work alone: a forward pass is a third of a training pass.

    Args:
        plan: The batch of a step.
        validation_windows: Of a validation.
        task_tokens: Of all endings of the tasks, with their contexts.
        sample_tokens: Of a sample. Each takes a forward pass of its own on every rank. Little of
            so short a pass is arithmetic: it takes about half as long as that of a micro-batch.
        exports: Whether the final model is made.
    """
    return Forecast(
        validation=validation_windows * plan.sequence_length / (3 * plan.tokens),
        tasks=task_tokens / (3 * plan.tokens),
        sample=sample_tokens / (6 * plan.accumulation),
        exports=exports,
    )


class Throughput:
    """Splits the session's time into steps and what comes between them.

    The first steps compile, allocate and fill caches; they are left out of the mean as soon as
    there are later ones.

    Attributes:
        laps: Seconds of each activity so far.
        steps: Steps of this session.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        began_seconds: float | None = None,
        forecast: Forecast | None = None,
    ) -> None:
        """Start the first lap.

        Args:
            clock: Monotonic seconds.
            began_seconds: When the session began, by that clock; None: now.
            forecast: For what has not been measured yet; None: it takes no time.
        """
        self._clock = clock
        self._forecast = forecast or Forecast()
        self._started = self._last = clock() if began_seconds is None else began_seconds
        self._recent: dict[Activity, collections.deque[float]] = {
            activity: collections.deque(maxlen=RECENT) for activity in get_args(Activity)
        }
        self.laps: dict[Activity, float] = dict.fromkeys(get_args(Activity), 0.0)
        self.steps = 0

    def lap(self, activity: Activity, *, continued: bool = False) -> float:
        """Book the time since the last call on an activity; return it in seconds.

        Args:
            activity: What it was spent on.
            continued: It belongs to the last step, validation or save, and is not another one.
        """
        now, recent = self._clock(), self._recent[activity]
        seconds, self._last = now - self._last, now
        self.laps[activity] += seconds
        if continued:
            recent[-1] += seconds
            return seconds
        if activity == "step":
            self.steps += 1
            if self.steps == WARM_UP_STEPS + 1:
                recent.clear()
        recent.append(seconds)
        return seconds

    @property
    def session_seconds(self) -> float:
        """Time since the session began."""
        return self._clock() - self._started

    def seconds_left(self, ahead: Mapping[Activity, int]) -> float | None:
        """Return the time that so many of each activity will take; None before the first step.

        Each takes its mean so far, which holds the slow ones too: those recur. A median left them
        out, and with them up to half of the time.
        """
        recent = self._recent["step"]
        if not recent:
            return None
        step = statistics.fmean(recent)
        return sum(count * self._expected(activity, step) for activity, count in ahead.items())

    def _expected(self, activity: Activity, step_seconds: float) -> float:
        """Return the mean of an activity's measurements, or what is forecast without any."""
        measured, forecast = self._recent[activity], self._forecast
        if measured:
            return statistics.fmean(measured)
        if activity == "ending":
            return self.laps["start_up"] if forecast.exports else 0.0
        steps = {
            "validation": forecast.validation,
            "tasks": forecast.tasks,
            "sample": forecast.sample,
        }
        return steps.get(activity, 0.0) * step_seconds
