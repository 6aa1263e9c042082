"""Measure a session: its start, the time of each activity, the phases of steps, the time left."""

import collections
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, get_args

from refocused.config.batch_plan import BatchPlan
from refocused.config.cadence import Activity
from refocused.metrics.rank_times import PHASES, WINDOW, Phase, Row
from refocused.metrics.run_time import TimeSpent

P = ParamSpec("P")
T = TypeVar("T")

WARM_UP_STEPS = 10  # of each session: they compile, allocate and fill caches
RECENT = 1000  # measurements in a mean: the mean of 50 uneven steps is easily 20 % off
# A step of 24 layers under ZeRO-3 has a hundred marks of phases for each micro-batch.
MARKED_EVERY = 4  # steps
PENDING_STEPS = 100  # no device lags further behind, so reading older marks does not wait


def forecast(
    plan: BatchPlan,
    *,
    validation_sequences: int,
    task_tokens: int,
    sample_tokens: int,
    exports: bool,
) -> dict[Activity, float]:
    """Forecast the time of activities, until they are measured, as multiples of a step's time.

    A forward pass is a third of a training pass. The ending is a multiple of the start-up: a
    process that exports the final model starts as slowly as this session. `task_tokens` are those
    of all endings of the tasks, with their contexts. A token of a sample takes one forward pass on
    every rank, mostly overhead: half as long as that of a micro-batch.
    """
    return {
        "validation": validation_sequences * plan.sequence_length / (3 * plan.tokens),
        "tasks": task_tokens / (3 * plan.tokens),
        "sample": sample_tokens / (6 * plan.gradient_accumulation_steps),
        "ending": float(exports),
    }


class Throughput:
    """The one meter of a session's time.

    `lap` books host time on activities. `begin_step`, `begin_update` and `end_step` mark a step's
    phases in the device's own queue, so that timing them never waits for the device. `time_spent`
    combines both and gives every second one use.

    Attributes:
        laps: Seconds of each activity so far.
        steps: Steps of this session.
        first_seconds: From the activity before the first step to its first pass, and of that step
            on the device; None: not known before a `time_spent`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        device_kind: str = "cpu",
        began_seconds: float | None = None,
        forecast: Mapping[Activity, float] | None = None,
    ) -> None:
        """Start the first lap; the session began at `began_seconds` on the monotonic `clock`.

        On `cuda`, steps are timed by events in the GPU's current stream.
        """
        self._clock = clock
        self._mark, self._seconds_between = device_clock(device_kind, clock)
        self._forecast = forecast or {}
        self._started = self._last = clock() if began_seconds is None else began_seconds
        self._recent: dict[Activity, collections.deque[float]] = {
            activity: collections.deque(maxlen=RECENT) for activity in get_args(Activity)
        }
        self.laps: dict[Activity, float] = dict.fromkeys(get_args(Activity), 0.0)
        self.steps = 0
        self._step_work = 1.0
        self._step_began = self._update_began = self._mark()
        self._pending: collections.deque[tuple[Any, Any, Any]] = collections.deque()
        self._passes_seconds = self._updates_seconds = 0.0
        self._booked_until = 0.0
        self._booked: dict[str, float] = {}
        self.first_seconds: tuple[float | None, float | None] = (None, None)

    def lap(self, activity: Activity, *, continued: bool = False) -> float:
        """Book the time since the last call on an activity; return it in seconds.

        If `continued`, it belongs to the last step, validation or save, and is not another one.
        """
        now, recent = self._clock(), self._recent[activity]
        seconds, self._last = now - self._last, now
        self.laps[activity] += seconds
        whole = seconds / self._step_work if activity == "step" else seconds
        if continued:
            recent[-1] += whole
            return seconds
        if activity == "step":
            self.steps += 1
            if self.steps == WARM_UP_STEPS + 1:
                recent.clear()
        recent.append(whole)
        return seconds

    def begin_step(self, work: float = 1.0) -> None:
        """Mark the begin of a step's first pass; `work` is its share of a whole step's passes."""
        self._step_work = work
        if self.first_seconds[0] is None:
            self.first_seconds = (self._clock() - self._last, None)
        self._step_began = self._mark()

    def begin_update(self) -> None:
        """Mark the end of a step's last pass, where its update begins."""
        self._update_began = self._mark()

    def end_step(self) -> None:
        """Mark the end of a step."""
        self._pending.append((self._step_began, self._update_began, self._mark()))
        if len(self._pending) > PENDING_STEPS:
            self._measure_oldest_step()

    def _measure_oldest_step(self) -> None:
        began, update_began, ended = self._pending.popleft()
        if self.first_seconds[1] is None:
            self.first_seconds = (self.first_seconds[0], self._seconds_between(began, ended))
        self._passes_seconds += self._seconds_between(began, update_began)
        self._updates_seconds += self._seconds_between(update_began, ended)

    @property
    def session_seconds(self) -> float:
        """Time since the session began."""
        return self._clock() - self._started

    def seconds_left(self, ahead: Mapping[Activity, float]) -> float | None:
        """Return the time that so much of each activity will take; None before the first step.

        Each takes its mean so far, slow ones included, since those recur: a median would leave
        out up to half of the time.
        """
        steps = self._recent["step"]
        if not steps:
            return None

        def mean(activity: Activity) -> float:
            if recent := self._recent[activity]:
                return statistics.fmean(recent)
            unit = self.laps["start_up"] if activity == "ending" else statistics.fmean(steps)
            return self._forecast.get(activity, 0.0) * unit

        return sum(count * mean(activity) for activity, count in ahead.items())

    def time_spent(self, *, waited_seconds: float | None = None) -> TimeSpent:
        """Return what the time since the last call was spent on; waits for the device.

        Device time counts first: while the device computes, the host may wait for a batch or begin
        a save at no cost. Each other use gets at most what is then left of the time. Batches were
        waited for `waited_seconds` in this session; None: no longer than before.
        """
        while self._pending:
            self._measure_oldest_step()
        laps, booked = self.laps, self._booked
        totals = {
            "forward_backward": self._passes_seconds,
            "update": self._updates_seconds,
            "start_up": laps["start_up"],
            "ending": laps["ending"],
            "save_stall": laps["save"],
            "validation": laps["validation"] + laps["tasks"] + laps["sample"],
            "data_wait": booked.get("data_wait", 0.0) if waited_seconds is None else waited_seconds,
        }
        left, uses = self._since_booked(), dict[str, float]()
        for use, total in totals.items():
            uses[f"{use}_seconds"] = max(0.0, min(total - booked.get(use, 0.0), left))
            left -= uses[f"{use}_seconds"]
        self._booked = totals
        return TimeSpent(**uses, other_seconds=max(0.0, left))

    def time_without_use(self) -> TimeSpent:
        """Return the time since the last call as `other`, without waiting for the device."""
        return TimeSpent(other_seconds=self._since_booked())

    def _since_booked(self) -> float:
        before, self._booked_until = self._booked_until, self.session_seconds
        return self._booked_until - before


class StepPhases:
    """Marks the phases of every fourth step of this rank in the device's queue.

    A mark ends one phase and begins the next; marking never waits for the device. The time in which
    the queue waits for other ranks is booked as `wait`, in whichever phase it comes.
    """

    def __init__(
        self, device_kind: str = "cpu", *, clock: Callable[[], float] | None = None
    ) -> None:
        """Prepare; on `cuda` the marks are events in the GPU's current stream."""
        self._mark, self._seconds_between = device_clock(device_kind, clock)
        self._steps = 0
        self._marks: list[tuple[Phase, Any]] = []  # of the present step; empty: it is not measured
        self._measured: collections.deque[list[tuple[Phase, Any]]] = collections.deque(
            maxlen=WINDOW
        )

    def begin_step(self) -> None:
        """Begin a step with its first forward pass."""
        self._steps += 1
        is_measured = self._steps % MARKED_EVERY == 0
        self._marks = [("forward", self._mark())] if is_measured else []

    def begin(self, phase: Phase) -> None:
        """Mark the begin of a phase."""
        if self._marks:
            self._marks.append((phase, self._mark()))

    def end_step(self) -> None:
        """Mark the end of a step."""
        if self._marks:
            self._measured.append([*self._marks, ("wait", self._mark())])
            self._marks = []

    def as_wait(
        self, function: Callable[P, T], *, if_: Callable[[], bool] = lambda: True
    ) -> Callable[P, T]:
        """Return a function whose time counts as `wait`; only calls for which `if_` holds."""

        @functools.wraps(function)
        def waiting(*args: P.args, **named: P.kwargs) -> T:
            phase = self._marks[-1][0] if self._marks else "wait"
            if phase == "wait" or not if_():  # not measured, or inside of another wait
                return function(*args, **named)
            self.begin("wait")
            try:
                return function(*args, **named)
            finally:
                self.begin(phase)

        return waiting

    def take(self, *, data_seconds: float) -> list[Row]:
        """Return the steps measured since the last call; the device must have finished them.

        `data_seconds` is the mean wait for a step's batches since then.
        """
        rows = []
        for marks in self._measured:
            seconds = dict.fromkeys(PHASES, 0.0) | {"data": data_seconds}
            for (phase, began), (_, ended) in itertools.pairwise(marks):
                seconds[phase] += self._seconds_between(began, ended)
            rows.append([round(spent, 6) for spent in seconds.values()])
        self._measured.clear()
        return rows


def device_clock(
    device_kind: str, clock: Callable[[], float] | None = None
) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return how to mark a time in the device's queue, and the seconds between two marks.

    Only the second may wait for the device. A CPU has no queue: the host's `clock` counts.
    """
    if device_kind == "cuda":
        return _cuda_mark, _cuda_seconds
    return clock or time.perf_counter, lambda mark, later: later - mark


def _cuda_mark() -> Any:
    import torch  # `refocused cost` reads this file without it

    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _cuda_seconds(mark: Any, later: Any) -> float:
    later.synchronize()
    return float(mark.elapsed_time(later)) / 1000


@dataclasses.dataclass(slots=True)
class StartUp:
    """Seconds of each phase of rank 0's start, in order; None: it did not take place."""

    exit_seconds: float | None = None  # a crashed launch ended, and the pause of --restarts passed
    launch_seconds: float | None = None  # the supervisor's command and DeepSpeed's launcher started
    imports_seconds: float | None = None  # the interpreter started, and loaded torch and the rest
    join_seconds: float | None = None  # ranks found each other, and the run's settings were checked
    plan_seconds: float | None = None  # `auto` settings were decided, the folder was claimed
    checkpoint_seconds: float | None = None  # a checkpoint was found, fetched and verified
    data_seconds: float | None = None  # the data was opened, shards were fetched
    model_seconds: float | None = None  # the model was built, its blocks compiled
    engine_seconds: float | None = None  # the engine was built: the states were partitioned
    load_seconds: float | None = None  # the checkpoint was loaded, its loss checked
    ready_seconds: float | None = None  # tasks, mirror, sampler and trackers were started
    first_batch_seconds: float | None = None  # the first batches came
    first_step_seconds: float | None = None  # the first step was computed, kernels made for it

    def as_record(self) -> dict[str, float]:
        """Return the phases that took place for JSON."""
        fields = dataclasses.asdict(self).items()
        return {name: round(value, 3) for name, value in fields if value is not None}

    def as_line(self, step: int) -> str:
        """Return the whole time until a step, and every phase, as a log line."""
        since = "a crash" if self.exit_seconds is not None else "the start"
        phases = " | ".join(
            f"{name.removesuffix('_seconds').replace('_', ' ')} {value:.1f}"
            for name, value in self.as_record().items()
        )
        whole = f"{sum(self.as_record().values()):.1f} s"
        return f"  start-up {whole} from {since} to step {step:,}: {phases} s"


class StartUpClock:
    """Books the time since the last call on a phase; the first began at `began_seconds`."""

    def __init__(self, began_seconds: float) -> None:
        self.spent = StartUp()
        self.began_seconds = began_seconds
        self._last = began_seconds

    def end(self, phase: str, *, at_seconds: float | None = None) -> None:
        """End a phase, now or at a monotonic time; a phase may have several parts."""
        now = time.monotonic() if at_seconds is None else at_seconds
        name, seconds = f"{phase}_seconds", max(0.0, now - self._last)
        setattr(self.spent, name, (getattr(self.spent, name) or 0.0) + seconds)
        self._last = now
