"""The status of a run at one moment, and how long it has been silent."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from refocused.metrics.history import LossPoint, StepPoint
from refocused.monitor.readings import GpuSample, SystemSample

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


Status = Literal[
    "starting", "training", "silent", "finished", "stopped", "failed", "crashed", "unknown"
]
Liveness = Literal["alive", "gone", "elsewhere"]
LIVE: tuple[Status, ...] = ("starting", "training", "silent")
ENDED_EARLY: tuple[Status, ...] = ("stopped", "failed", "crashed")


@dataclasses.dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that was raised and has not ended.

    Attributes:
        name: Which rule.
        subject: Whom it is about.
        critical: Somebody should act now.
        text: What a person reads.
        time: When it began, in Unix seconds.
    """

    name: str
    subject: str
    critical: bool
    text: str
    time: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        time: In Unix seconds.
        kind: The run's word for it.
        text: What a person reads.
    """

    time: float | None
    kind: str
    text: str

    @property
    def is_trouble(self) -> bool:
        """Whether it is a warning or a failure."""
        return self.kind.endswith(("failed", "warning")) or self.kind == "alarm"


@dataclasses.dataclass(frozen=True, slots=True)
class Saves:
    """What would be left if the machine went now.

    Attributes:
        newest_step: The last step directory on the disk; None: there is none.
        seconds_ago: Since it was saved.
        steps_at_risk: Steps made since.
        seconds_at_risk: Of training that would be lost.
        local: Step directories on the disk.
    """

    newest_step: int | None
    seconds_ago: float | None
    steps_at_risk: int
    seconds_at_risk: float | None
    local: int


@dataclasses.dataclass(frozen=True, slots=True)
class Mirror:
    """The copy of the checkpoints elsewhere, as `mirror.json` tells of it.

    Attributes:
        bucket: Address it copies to.
        newest_step: The last step that is whole there.
        waiting: Steps that are not yet.
        uploading_fraction: Of the step being copied.
        failed: Steps that cannot be copied.
        last_error: Why the last attempt failed.
    """

    bucket: str
    newest_step: int | None
    waiting: int
    uploading_fraction: float | None
    failed: int
    last_error: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class LocalShards:
    """The shards on the run's first machine, as `state.json` tells of them.

    Attributes:
        local: Shards on its disk.
        total: Of the data.
        ready: Of those that come next, the local ones up to the first that is not.
    """

    local: int
    total: int
    ready: int


@dataclasses.dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment; None is unknown.

    While it trains, the times and the money go on since its last line.

    Attributes:
        name: Of the run.
        status: `silent`: it trains but has written nothing for long; `crashed`: it says that it
            trains and is gone.
        host: Where it trains.
        exit_code: Of the command, once it has ended.
        note: What else is to be known of the status: why it failed, what cannot be read.
        last_step: The figures of the last logged step; None before this session's first.
        silent_seconds: Since its last line.
        resumes_from: Of a run that ended early: the step of the checkpoint that it would go on
            from, 0: anew. The time and the money left are those from there on.
        ends: When it will be done, in Unix seconds.
    """

    name: str
    status: Status
    host: str | None
    exit_code: int | None
    note: str
    step: int
    total_steps: int | None
    tokens: int | None
    loss: float | None
    validation_loss: float | None
    best_loss: float | None
    best_step: int | None
    last_step: StepPoint | None
    silent_seconds: float | None
    seconds_trained: float | None
    cost_usd: float | None
    seconds_left: float | None
    cost_left_usd: float | None
    resumes_from: int | None
    budget_usd: float | None
    ends: float | None
    saves: Saves
    mirror: Mirror | None
    shards: LocalShards | None
    gpus: Sequence[GpuSample]
    systems: Sequence[SystemSample]
    samples_age_seconds: float | None
    alarms: Sequence[Alarm]
    events: Sequence[Event]
    steps: Sequence[StepPoint]
    validations: Sequence[LossPoint]

    @property
    def is_live(self) -> bool:
        """Whether it trains, as far as one can see."""
        return self.status in LIVE

    @property
    def has_ended(self) -> bool:
        """Whether it surely trains no more."""
        return self.status == "finished" or self.status in ENDED_EARLY

    @property
    def progress_fraction(self) -> float | None:
        """Share of the run's steps that are made."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else None

    def as_record(self) -> dict[str, Any]:
        """Return the fields for JSON, without the curves."""
        curves = {"steps", "validations"}
        plain = dataclasses.replace(self, steps=(), validations=())
        return {
            name: value for name, value in dataclasses.asdict(plain).items() if name not in curves
        }
