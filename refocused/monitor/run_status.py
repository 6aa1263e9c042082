"""The status of a run at one moment, computed from what its files say."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from refocused.config.prices import cost_usd
from refocused.metrics.history import LossHistory, LossPoint, StepPoint, unix_time
from refocused.metrics.jsonl import number, text, whole_number
from refocused.monitor.readings import GpuSample, SystemSample
from refocused.monitor.run_reader import RECENT_STEPS, Alarm, Event, Mirror, RunFiles

LATE_MEDIANS = 5
SHORTEST_WAIT_SECONDS = 120.0  # a validation and a save may lie between two log lines
FIRST_STEP_SECONDS = 1800.0  # it compiles, and waits for the first shards

Status = Literal[
    "starting", "training", "silent", "finished", "stopped", "failed", "crashed", "unknown"
]
LIVE: tuple[Status, ...] = ("starting", "training", "silent")
ENDED_EARLY: tuple[Status, ...] = ("stopped", "failed", "crashed")
_ENDED: dict[str, Status] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}


@dataclasses.dataclass(frozen=True, slots=True)
class Saves:
    """What would be left if the machine went now."""

    newest_step: int | None  # of the last checkpoint on the disk
    seconds_ago: float | None  # since it was saved
    steps_at_risk: int  # made since
    seconds_at_risk: float | None  # of training that would be lost
    local: int  # checkpoints on the disk


@dataclasses.dataclass(frozen=True, slots=True)
class LocalShards:
    """The shards on the run's first machine."""

    local: int
    total: int  # of the data
    ready: int  # of those that come next, the local ones up to the first that is not


@dataclasses.dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment; time and money of a live run go on since its last line."""

    name: str
    status: Status  # `silent`: it trains but has logged nothing for long; `crashed`: it says that
    # it trains and its process is gone
    host: str | None
    exit_code: int | None
    note: str  # more about the status: why it failed, what cannot be read
    step: int
    total_steps: int | None
    tokens: int | None
    loss: float | None
    validation_loss: float | None
    best_loss: float | None
    best_step: int | None
    last_step: StepPoint | None  # the last logged one; None before this session's first
    silent_seconds: float | None  # since its last line
    seconds_trained: float | None
    cost_usd: float | None
    seconds_left: float | None
    cost_left_usd: float | None
    resumes_from: int | None  # of a run that ended early: the step that it would resume from, 0:
    # anew; the time and the money left are those from there on
    budget_usd: float | None
    ends: float | None  # Unix seconds
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
        record = dataclasses.asdict(dataclasses.replace(self, steps=(), validations=()))
        del record["steps"], record["validations"]
        return record


def view_of(found: RunFiles, *, now: float) -> RunView:
    """Compute a run's status; `now` is in Unix seconds."""
    state = _state(found)
    step = whole_number(state, "step") or 0
    updated = unix_time(state.get("updated"))
    status = _status(found, now)
    # A session writes the state once before its first logged step, without a speed.
    has_begun = state.get("status") != "training" or "tokens_per_second" in state
    last = found.steps[-1] if found.steps and has_begun else None
    passed = max(0.0, now - updated) if status in LIVE and updated is not None else 0.0
    settings = found.settings.get("cost")
    cost = settings if isinstance(settings, dict) else {}
    price = number(cost, "per_hour_usd")
    resumes_from = left = None
    if status in ENDED_EARLY:
        resumes_from = found.resume_step
        left = seconds_left(found.steps, resumes_from=resumes_from)
    elif last and status in LIVE:
        left = seconds_left([last], passed=passed)
    trained, spent = number(state, "seconds"), number(state, "cost_usd")
    counts = ("exit_code", "total_steps", "tokens", "best_step")
    losses = ("loss", "validation_loss", "best_loss")
    figures: dict[str, Any] = {name: whole_number(state, name) for name in counts}
    figures |= {name: number(state, name) for name in losses}
    return RunView(
        **figures,
        name=text(state, "run") or found.name,
        status=status,
        host=text(state, "host"),
        note=_note(found, status),
        step=step,
        last_step=last,
        silent_seconds=None if updated is None else max(0.0, now - updated),
        seconds_trained=None if trained is None else trained + passed,
        cost_usd=None if spent is None else spent + (cost_usd(passed, price) or 0.0),
        seconds_left=left,
        cost_left_usd=cost_usd(left, price),
        resumes_from=resumes_from,
        budget_usd=number(cost, "budget_usd"),
        ends=now + left if left is not None and status in LIVE else None,
        saves=_saves(found, step, last, now),
        mirror=found.mirror,
        shards=_shards(state),
        gpus=found.gpus,
        systems=found.systems,
        samples_age_seconds=None if found.sampled is None else max(0.0, now - found.sampled),
        alarms=found.alarms,
        events=found.events,
        steps=found.steps,
        validations=found.validations,
    )


def _state(found: RunFiles) -> Mapping[str, Any]:
    """Return `state.json`, or what the other files say while it cannot be read."""
    if found.state_trouble is None:
        return found.state or {}
    run = found.settings.get("run")
    best = LossHistory([], list(found.validations)).best
    last = found.steps[-1] if found.steps else StepPoint(0)
    return {
        "step": last.step,
        "total_steps": whole_number(run, "steps") if isinstance(run, dict) else None,
        "loss": last.loss,
        "best_loss": None if best is None else best.loss,
        "best_step": None if best is None else best.step,
        "seconds": last.seconds_trained,
        "cost_usd": last.cost_usd,
    }


def _status(found: RunFiles, now: float) -> Status:
    if found.state_trouble is not None:
        return "unknown"
    if found.state is None:
        return "starting"
    if found.status != "training":
        return _ENDED.get(found.status or "", "unknown")
    if found.liveness == "gone":
        return "crashed"
    updated = unix_time(found.state.get("updated"))
    if updated is None or not found.has_steps_left:
        return "training"  # after the last step the model is written, which logs nothing
    logged = logged_times(found.steps, since=unix_time(found.state.get("session_began")) or 0.0)
    silent_seconds = now - (logged[-1] if logged else updated)
    return "silent" if silent_seconds > longest_silence(logged) else "training"


def logged_times(steps: Sequence[StepPoint], *, since: float) -> list[float]:
    """Return when the last steps of a session that began then were logged, in Unix seconds."""
    times = [step.time for step in steps[-RECENT_STEPS:] if step.time is not None]
    return [time for time in times if time >= since]


def longest_silence(logged: Sequence[float]) -> float:
    """Return how many seconds after the last logged step the next one is late."""
    gaps = [after - before for before, after in itertools.pairwise(logged)]
    if len(gaps) < 3:
        return FIRST_STEP_SECONDS
    return max(LATE_MEDIANS * statistics.median(gaps), 1.5 * max(gaps), SHORTEST_WAIT_SECONDS)


def seconds_left(
    steps: Sequence[StepPoint], *, passed: float = 0.0, resumes_from: int | None = None
) -> float | None:
    """Return the time left by what training expected at its last line; None: unknown, or over.

    `passed` are the seconds since then of a run that trains. One that ended early `resumes_from` a
    step, and makes those after it again at the mean pace of the last lines.
    """
    if not steps or steps[-1].seconds_left is None:
        return None
    left = steps[-1].seconds_left - passed
    if resumes_from is not None:
        left += (steps[-1].step - resumes_from) * (mean_step_seconds(steps[-RECENT_STEPS:]) or 0.0)
    return left if left >= 0 else None


def mean_step_seconds(steps: Sequence[StepPoint]) -> float | None:
    """Return the mean time of a step over some lines; None: unknown."""
    found = [one.step_seconds for one in steps if one.step_seconds is not None]
    return statistics.fmean(found) if found else None


def mean_tokens_per_second(steps: Sequence[StepPoint]) -> float | None:
    """Return the tokens of some lines by the time that they took; None: unknown."""
    found = [speed for one in steps if (speed := one.tokens_per_second or 0.0) > 0]
    return statistics.harmonic_mean(found) if found else None


def _note(found: RunFiles, status: Status) -> str:
    state = found.state or {}
    if found.state_trouble is not None:
        return f"state.json cannot be read: {found.state_trouble}"
    if status == "unknown":
        return f"state.json names no status that is known: {state.get('status')!r}"
    if status == "starting":
        return "no step yet"
    if status == "crashed":
        return "without a word"
    if status == "failed":
        errors = [event.text for event in found.events if event.kind == "failed"]
        return errors[-1].partition("\n")[0] if errors else ""
    if status == "stopped":
        return f"by {str(state.get('stopped_by') or 'a wish').lower().replace('_', ' ')}"
    return f"on {state.get('host')}, seen from afar" if found.liveness == "elsewhere" else ""


def _saves(found: RunFiles, step: int, last: StepPoint | None, now: float) -> Saves:
    newest = max(found.saved_steps, default=None)
    steps = max(0, step - (newest or 0))
    pace = last.step_seconds if last is not None else None
    return Saves(
        newest_step=newest,
        seconds_ago=None if found.saved_time is None else max(0.0, now - found.saved_time),
        steps_at_risk=steps,
        seconds_at_risk=None if pace is None else steps * pace,
        local=len(found.saved_steps),
    )


def _shards(state: Mapping[str, Any]) -> LocalShards | None:
    local, total = whole_number(state, "shards_local"), whole_number(state, "shards_total")
    if local is None or total is None:
        return None
    return LocalShards(local, total, whole_number(state, "shards_ready") or 0)
