"""Speed of a session, the phases of a step, and where the time went."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, get_args

import torch

from refocused.config.batch_plan import BatchPlan
from refocused.metrics.run_time import TimeSpent

PENDING_STEPS = 100  # further behind the host no device is: asking about older ones does not wait


class Moment(Protocol):
    """A point in the device's own order of work."""

    def seconds_until(self, later: Moment) -> float:
        """Return the time between two points, once both have passed."""


class HostMoment:
    """A point that has passed when it is noted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Note it, in seconds of a clock."""
        self._at = clock()

    def seconds_until(self, later: Moment) -> float:
        """Return the time between."""
        assert isinstance(later, HostMoment)
        return later._at - self._at


class CudaMoment:
    """A point in the GPU's queue, which the host does not wait for."""

    def __init__(self) -> None:
        """Put it into the current stream."""
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def seconds_until(self, later: Moment) -> float:
        """Return the time between, after waiting for the later one."""
        assert isinstance(later, CudaMoment)
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event)) / 1000


class StepPhases:
    """Times the passes and the update of steps without waiting for the device."""

    def __init__(self, moment: Callable[[], Moment]) -> None:
        """Begin with nothing.

        Args:
            moment: Notes the present point.
        """
        self._moment = moment
        self._began = self._passed = moment()
        self._pending: collections.deque[tuple[Moment, Moment, Moment]] = collections.deque()
        self._sums = [0.0, 0.0]

    def begin(self) -> None:
        """Note that a step's first pass begins."""
        self._began = self._moment()

    def passes_made(self) -> None:
        """Note that a step's last pass is over, and its update begins."""
        self._passed = self._moment()

    def end(self) -> None:
        """Note that a step is over."""
        self._pending.append((self._began, self._passed, self._moment()))
        while len(self._pending) > PENDING_STEPS:
            self._add_oldest()

    def take(self) -> tuple[float, float]:
        """Return the seconds of passes and of updates since the last call; waits for the device."""
        while self._pending:
            self._add_oldest()
        passes, updates = self._sums
        self._sums = [0.0, 0.0]
        return passes, updates

    def _add_oldest(self) -> None:
        began, passed, ended = self._pending.popleft()
        self._sums[0] += began.seconds_until(passed)
        self._sums[1] += passed.seconds_until(ended)


def step_phases(device_kind: str, clock: Callable[[], float] = time.monotonic) -> StepPhases:
    """Return what times steps on `cuda`, or on the host."""
    return StepPhases(CudaMoment if device_kind == "cuda" else lambda: HostMoment(clock))


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
    plan: BatchPlan, *, validation_windows: int, task_tokens: int, sample_tokens: int, exports: bool
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


class TimeBook:
    """Gives every second of a session one use."""

    def __init__(self, throughput: Throughput, phases: StepPhases) -> None:
        """Begin where the session does.

        Args:
            throughput: Books laps on the host.
            phases: Times the steps where they are computed.
        """
        self._throughput = throughput
        self._phases = phases
        self._booked_until = 0.0
        self._booked: dict[str, float] = {}

    def since_last(self, *, waited_seconds: float | None = None) -> TimeSpent:
        """Return what the time since the last call was spent on; waits for the device.

        What the device computed comes first: while it does, the host may wait for a batch or begin
        a save, and neither costs anything. Of what is left each use gets at most what it took.

        Args:
            waited_seconds: That batches were waited for in this session; None: no more than before.
        """
        now = self._throughput.session_seconds
        left, self._booked_until = now - self._booked_until, now
        passes, updates = self._phases.take()
        laps = self._throughput.laps
        uses = {
            "forward_backward": passes,
            "update": updates,
            **{use: self._new(use, laps[use]) for use in ("start_up", "ending", "save")},
            "validation": self._new(
                "validation", laps["validation"] + laps["tasks"] + laps["sample"]
            ),
            "data_wait": 0.0 if waited_seconds is None else self._new("data", waited_seconds),
        }
        for use, seconds in uses.items():
            uses[use] = max(0.0, min(seconds, left))
            left -= uses[use]
        return TimeSpent(
            start_up_seconds=uses["start_up"],
            forward_backward_seconds=uses["forward_backward"],
            update_seconds=uses["update"],
            data_wait_seconds=uses["data_wait"],
            save_stall_seconds=uses["save"],
            validation_seconds=uses["validation"],
            ending_seconds=uses["ending"],
            other_seconds=max(0.0, left),
        )

    def rest_as_other(self) -> TimeSpent:
        """Return the time since the last call without a use, and without asking the device."""
        before, self._booked_until = self._booked_until, self._throughput.session_seconds
        return TimeSpent(other_seconds=self._booked_until - before)

    def _new(self, use: str, total_seconds: float) -> float:
        """Return what came to a total since it was last asked for."""
        before, self._booked[use] = self._booked.get(use, 0.0), total_seconds
        return total_seconds - before
