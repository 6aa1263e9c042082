"""The one meter of a session's time: its start, its activities, its steps, and what is left."""

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


class Meter:
    """The one meter of a rank's time; every span has a name.

    `end_phase` books host time on the phases of the start, and `lap` on activities. `begin_step`,
    `begin` and `end_step` mark the phases of a step in the device's own queue, so that timing them
    never waits for the device: forward and backward passes and waits for other ranks in every
    fourth step, the update in each. `time_spent` combines all and gives every second one use.

    Attributes:
        device_kind: On `cuda`, steps are timed by events in the GPU's current stream.
        forecast: Time of activities that were not measured yet, in multiples of a step's.
        start_up: Seconds of each phase of the start.
        laps: Seconds of each activity so far.
        steps: Steps of this session.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        device_kind: str = "cpu",
        began_seconds: float | None = None,
    ) -> None:
        """Start the first span; the session began at `began_seconds` on the monotonic `clock`."""
        self._clock = clock
        self.device_kind = device_kind
        self.forecast: Mapping[Activity, float] = {}
        self.start_up = StartUp()
        self._began = self._last = clock() if began_seconds is None else began_seconds
        self._recent: dict[Activity, collections.deque[float]] = {
            activity: collections.deque(maxlen=RECENT) for activity in get_args(Activity)
        }
        self.laps: dict[Activity, float] = dict.fromkeys(get_args(Activity), 0.0)
        self.steps = self._begun_steps = 0
        self._step_work = 1.0
        self._marks: list[tuple[Phase, Any]] = []  # of the present step; empty: there is none
        self._unread: collections.deque[tuple[Any, Any, Any]] = collections.deque()
        self._measured: collections.deque[list[tuple[Phase, Any]]] = collections.deque(
            maxlen=WINDOW
        )
        self._passes_seconds = self._updates_seconds = 0.0
        self._booked_until = 0.0
        self._booked: dict[str, float] = {}

    def end_phase(self, phase: str, *, at_seconds: float | None = None) -> None:
        """End a phase of the start, now or at a monotonic time; a phase may have several parts."""
        now = self._clock() if at_seconds is None else at_seconds
        name, seconds = f"{phase}_seconds", max(0.0, now - self._last)
        setattr(self.start_up, name, (getattr(self.start_up, name) or 0.0) + seconds)
        self.laps["start_up"] += seconds
        self._last = now

    def lap(
        self, activity: Activity, *, continued: bool = False, work: float | None = None
    ) -> float:
        """Book the time since the last call on an activity; return it in seconds.

        If `continued`, it belongs to the last step, validation or save, and is not another one.
        `work` is the share of a whole step's passes that a step had; None: as the one before.
        """
        self._step_work = self._step_work if work is None else work
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

    def begin_step(self) -> None:
        """Begin a step with its first forward pass."""
        self._begun_steps += 1
        if self._begun_steps == 1:
            self.start_up.first_batch_seconds = self._clock() - self._last
        self._marks = [("forward", self._mark())]

    def begin(self, phase: Phase) -> None:
        """Mark the begin of a phase, which ends the one before."""
        if self._marks and (phase == "update" or self._begun_steps % MARKED_EVERY == 0):
            self._marks.append((phase, self._mark()))

    def end_step(self) -> None:
        """Mark the end of a step that `begin_step` began."""
        if not self._marks:
            return
        marks = [*self._marks, ("wait", self._mark())]
        began, ended = marks[0][1], marks[-1][1]
        update = next((mark for phase, mark in marks if phase == "update"), ended)
        self._marks = []
        self._unread.append((began, update, ended))
        if len(self._unread) > PENDING_STEPS:
            self._read_oldest_step()
        if self._begun_steps % MARKED_EVERY == 0:
            self._measured.append(marks)

    def _mark(self) -> Any:
        """Mark a time in the device's queue; a CPU has none, and the host's clock counts."""
        if self.device_kind != "cuda":
            return self._clock()
        import torch  # `refocused cost` reads this file without it

        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds_between(self, mark: Any, later: Any) -> float:
        """Return the seconds between two marks; this may wait for the device."""
        if self.device_kind != "cuda":
            return float(later - mark)
        later.synchronize()
        return float(mark.elapsed_time(later)) / 1000

    def _read_oldest_step(self) -> None:
        began, update_began, ended = self._unread.popleft()
        if self.start_up.first_step_seconds is None:
            self.start_up.first_step_seconds = self._seconds_between(began, ended)
        self._passes_seconds += self._seconds_between(began, update_began)
        self._updates_seconds += self._seconds_between(update_began, ended)

    def as_wait(
        self, function: Callable[P, T], *, if_: Callable[[], bool] = lambda: True
    ) -> Callable[P, T]:
        """Return a function whose time counts as `wait`; only calls for which `if_` holds."""

        @functools.wraps(function)
        def waiting(*args: P.args, **named: P.kwargs) -> T:
            is_measured = self._marks and self._begun_steps % MARKED_EVERY == 0
            phase = self._marks[-1][0] if is_measured else "wait"
            if phase == "wait" or not if_():  # not measured, or inside of another wait
                return function(*args, **named)
            self.begin("wait")
            try:
                return function(*args, **named)
            finally:
                self.begin(phase)

        return waiting

    def step_phases(self, *, data_seconds: float) -> list[Row]:
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

    @property
    def session_seconds(self) -> float:
        """Time since the session began."""
        return self._clock() - self._began

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
            return self.forecast.get(activity, 0.0) * unit

        return sum(count * mean(activity) for activity, count in ahead.items())

    def time_spent(self, *, waited_seconds: float | None = None) -> TimeSpent:
        """Return what the time since the last call was spent on; waits for the device.

        Device time counts first: while the device computes, the host may wait for a batch or begin
        a save at no cost. Each other use gets at most what is then left of the time. Batches were
        waited for `waited_seconds` in this session; None: no longer than before.
        """
        while self._unread:
            self._read_oldest_step()
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
