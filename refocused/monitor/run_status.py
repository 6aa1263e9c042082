"""The status of a run at one moment, computed from its files."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from refocused.config.prices import cost_usd
from refocused.metrics.history import StepPoint, lowest, unix_time
from refocused.metrics.jsonl import number, text, whole_number
from refocused.metrics.run_time import RunTime
from refocused.monitor.readings import GpuSample, SystemSample
from refocused.monitor.run_reader import RECENT_STEPS, Alarm, Event, Mirror, RunFiles

# Without a log line or a reading for so long a run is silent: its machine may be lost. Whether its
# ranks hang is known to the watchdog alone, which sees what they do.
SILENT_SECONDS = 1800.0

Status = Literal[
    "starting", "training", "silent", "finished", "stopped", "failed", "crashed", "unknown"
]
LIVE: tuple[Status, ...] = ("starting", "training", "silent")
ENDED_EARLY: tuple[Status, ...] = ("stopped", "failed", "crashed")
_ENDED: dict[str, Status] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}


@dataclasses.dataclass(frozen=True, slots=True)
class Saves:
    """The checkpoints that would be left if the machine was lost now."""

    newest_step: int | None  # of the last checkpoint on the disk; without one, in the mirror
    seconds_ago: float | None  # since it was saved
    steps_at_risk: int  # taken since
    seconds_at_risk: float | None  # of training that would be lost
    local: int  # checkpoints on the disk


@dataclasses.dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment; time and cost of a live run include the time since its last line."""

    name: str
    # `silent`: its ranks hang, or it writes nothing; `crashed`: its process is gone, its status is
    # training
    status: Status
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
    # The step from which a run that ended early would resume (0: none); the time and the cost left
    # count from there.
    resumes_from: int | None
    budget_usd: float | None
    ends: float | None  # Unix seconds
    saves: Saves
    mirror: Mirror | None
    # Of the run's first machine: `local` ones, `total` of the data, and `ready`, those of the next
    # ones before the first that is not local.
    shards: Mapping[str, int] | None
    gpus: Sequence[GpuSample]
    systems: Sequence[SystemSample]
    samples_age_seconds: float | None
    alarms: Sequence[Alarm]
    past_alarms: Sequence[Alarm]
    events: Sequence[Event]
    steps: Sequence[StepPoint]
    validations: Sequence[StepPoint]
    used: RunTime | None = None  # where the time since the first start went
    gpu_history: Sequence[GpuSample] = ()  # the last readings of all, the newest last

    @property
    def is_live(self) -> bool:
        """Whether it trains, as far as its files show."""
        return self.status in LIVE

    @property
    def has_ended(self) -> bool:
        """Whether it certainly no longer trains."""
        return self.status == "finished" or self.status in ENDED_EARLY

    @property
    def progress_fraction(self) -> float | None:
        """Share of the run's steps that are done."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else None

    def as_record(self) -> dict[str, Any]:
        """Return the fields for JSON, without the curves, the history and the past alarms."""
        left_out = ("steps", "validations", "past_alarms", "gpu_history")
        emptied: dict[str, Any] = dict.fromkeys(left_out, ())
        without = dataclasses.replace(self, **emptied)
        return {k: v for k, v in dataclasses.asdict(without).items() if k not in left_out}


def view_of(found: RunFiles, *, now: float) -> RunView:
    """Compute a run's status; `now` is in Unix seconds."""
    state = _state(found)
    step = whole_number(state, "step") or 0
    updated = unix_time(state.get("updated"))
    status = _status(found, now)
    # A session writes the state once before its first logged step, without a speed.
    has_begun = state.get("status") != "training" or "tokens_per_second" in state
    last = found.steps[-1] if found.steps and has_begun else None
    is_counted = status in LIVE and "phase" not in state  # the figures are of an earlier session
    passed = max(0.0, now - updated) if is_counted and updated is not None else 0.0
    settings = found.settings.get("cost")
    cost = settings if isinstance(settings, dict) else {}
    price = number(cost, "per_hour_usd")
    resumes_from = left = None
    if status in ENDED_EARLY:
        there = None if found.mirror is None else found.mirror.newest_step
        resumes_from = max([*found.saved_steps, there or 0])
        left = seconds_left(found.steps, resumes_from=resumes_from)
    elif last and status in LIVE:
        left = seconds_left([last], passed=passed)
    trained, spent = number(state, "seconds"), number(state, "cost_usd")
    of_shards = {
        name: whole_number(state, f"shards_{name}") for name in ("local", "total", "ready")
    }
    shards = {name: count for name, count in of_shards.items() if count is not None}
    counts = ("exit_code", "total_steps", "tokens", "best_step")
    losses = ("loss", "validation_loss", "best_loss")
    figures: dict[str, Any] = {name: whole_number(state, name) for name in counts}
    figures |= {name: number(state, name) for name in losses}
    parts = ("mirror", "gpus", "systems", "alarms", "past_alarms", "events", "steps", "validations")
    figures |= {name: getattr(found, name) for name in (*parts, "used", "gpu_history")}
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
        shards=shards if len(shards) == 3 else None,
        samples_age_seconds=None if found.sampled is None else max(0.0, now - found.sampled),
    )


def _state(found: RunFiles) -> Mapping[str, Any]:
    """Return `state.json`, or while it cannot be read what the other files show."""
    if found.state_trouble is None:
        return found.state or {}
    run = found.settings.get("run")
    best = lowest(found.validations)
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
    if found.status == "starting" and found.liveness != "gone":
        return "starting"
    if found.status not in ("starting", "training"):
        return _ENDED.get(found.status or "", "unknown")
    if found.liveness == "gone":
        return "crashed"
    if any(alarm.name == "no_step" for alarm in found.alarms):
        return "silent"
    updated = unix_time(found.state.get("updated"))
    if updated is None or not found.has_steps_left:
        return "training"  # after the last step the model is exported, without log lines
    newest = max(updated, found.sampled or 0.0)
    return "silent" if now - newest > SILENT_SECONDS else "training"


def seconds_left(
    steps: Sequence[StepPoint], *, passed: float = 0.0, resumes_from: int | None = None
) -> float | None:
    """Return the time left as training estimated it in its last line; None: unknown, or over.

    `passed` are the seconds since that line. A run that ended early resumes at the step
    `resumes_from`, and repeats the steps after it at the mean pace of the last lines.
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
    """Return the mean speed over some lines, weighted by time; None: unknown."""
    found = [speed for one in steps if (speed := one.tokens_per_second or 0.0) > 0]
    return statistics.harmonic_mean(found) if found else None


def _note(found: RunFiles, status: Status) -> str:
    state = found.state or {}
    if found.state_trouble is not None:
        return f"state.json cannot be read: {found.state_trouble}"
    if status == "unknown":
        return f"state.json has an unknown status: {state.get('status')!r}"
    if status == "starting":
        return text(state, "phase") or "no step yet"
    if status == "crashed":
        return "the process ended without reporting why"
    if status == "failed":
        errors = [event.text for event in found.events if event.kind == "failed"]
        return errors[-1].partition("\n")[0] if errors else ""
    if status == "stopped":
        return f"by {str(state.get('stopped_by') or 'a request').lower().replace('_', ' ')}"
    return f"on {state.get('host')}" if found.liveness == "elsewhere" else ""


def _saves(found: RunFiles, step: int, last: StepPoint | None, now: float) -> Saves:
    there = found.mirror.newest_step if found.mirror is not None else None
    newest = max(found.saved_steps, default=there)
    steps = max(0, step - (newest or 0))
    pace = last.step_seconds if last is not None else None
    return Saves(
        newest_step=newest,
        seconds_ago=None if found.saved_time is None else max(0.0, now - found.saved_time),
        steps_at_risk=steps,
        seconds_at_risk=None if pace is None else steps * pace,
        local=len(found.saved_steps),
    )
