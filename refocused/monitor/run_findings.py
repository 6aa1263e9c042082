"""From what the files of a run say to what there is to see of it: pure arithmetic."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from refocused.config.prices import cost_usd
from refocused.metrics.history import LossHistory, LossPoint, StepPoint, unix_time
from refocused.metrics.jsonl import number, text, whole_number
from refocused.monitor.readings import GpuSample, SystemSample
from refocused.monitor.run_status import (
    ENDED_EARLY,
    LIVE,
    Alarm,
    Event,
    Liveness,
    LocalShards,
    Mirror,
    RunView,
    Saves,
    Status,
    silence,
)

_ENDED: dict[str, Status] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
RECENT_STEPS = 51  # of the log: what is usual for its lines


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """What the files of a run and its machine say, before anything is computed from it.

    Attributes:
        name: Of the run's folder.
        state: `state.json`; None: there is none, or it cannot be read.
        state_trouble: Why it cannot be read; None: it can, or there is none.
        settings: `run.yaml`.
        mirror: `mirror.json`; None: there is none.
        steps: The logged steps of the way that training took.
        validations: Its validations.
        saved_steps: Step directories on the disk.
        saved_time: When the newest of them was, in Unix seconds.
        gpus: The newest sample of each GPU.
        systems: The newest sample of each machine.
        sampled: When the newest sample was taken, in Unix seconds.
        alarms: Not ended.
        events: The last ones.
        liveness: Of the process that trains; None: it never said who it is.
    """

    name: str
    state: Mapping[str, Any] | None
    state_trouble: str | None
    settings: Mapping[str, Any]
    mirror: Mapping[str, Any] | None
    steps: Sequence[StepPoint]
    validations: Sequence[LossPoint]
    saved_steps: Sequence[int]
    saved_time: float | None
    gpus: Sequence[GpuSample]
    systems: Sequence[SystemSample]
    sampled: float | None
    alarms: Sequence[Alarm]
    events: Sequence[Event]
    liveness: Liveness | None


def view_of(found: Findings, *, now: float) -> RunView:
    """Compute what there is to see.

    Args:
        found: What the files say.
        now: Unix seconds.
    """
    state = _state(found)
    step = whole_number(state, "step") or 0
    updated = unix_time(state.get("updated"))
    last = _last_step(found.steps, state)
    status = _status(found, state, now=now)
    passed = max(0.0, now - updated) if status in LIVE and updated is not None else 0.0
    cost_settings = found.settings.get("cost")
    cost = cost_settings if isinstance(cost_settings, dict) else {}
    price = number(cost, "per_hour_usd")
    resumes_from = None
    if status in ENDED_EARLY:
        resumes_from = resume_step(found.saved_steps, found.mirror)
        left = seconds_left(found.steps, resumes_from=resumes_from)
    else:
        left = seconds_left([last], passed=passed) if last and status in LIVE else None
    return RunView(
        name=text(state, "run") or found.name,
        status=status,
        host=text(state, "host"),
        exit_code=whole_number(state, "exit_code"),
        note=_note(found, status),
        step=step,
        total_steps=whole_number(state, "total_steps"),
        tokens=whole_number(state, "tokens"),
        loss=number(state, "loss"),
        validation_loss=number(state, "validation_loss"),
        best_loss=number(state, "best_loss"),
        best_step=whole_number(state, "best_step"),
        last_step=last,
        silent_seconds=None if updated is None else max(0.0, now - updated),
        seconds_trained=_plus(number(state, "seconds"), passed),
        cost_usd=_plus(number(state, "cost_usd"), cost_usd(passed, price) or 0.0),
        seconds_left=left,
        cost_left_usd=cost_usd(left, price),
        resumes_from=resumes_from,
        budget_usd=number(cost, "budget_usd"),
        ends=now + left if left is not None and status in LIVE else None,
        saves=_saves(found, step, last, now=now),
        mirror=None if found.mirror is None else _mirror(found.mirror),
        shards=_shards(state),
        gpus=found.gpus,
        systems=found.systems,
        samples_age_seconds=None if found.sampled is None else max(0.0, now - found.sampled),
        alarms=found.alarms,
        events=found.events,
        steps=found.steps,
        validations=found.validations,
    )


def resume_step(saved_steps: Sequence[int], mirror: Mapping[str, Any] | None) -> int:
    """Return the newest step that is saved here or in the mirror, 0 without any.

    Args:
        saved_steps: Step directories on the disk.
        mirror: `mirror.json`; None: there is none.
    """
    there = None if mirror is None else _mirror(mirror).newest_step
    return max([*saved_steps, there or 0])


def _state(found: Findings) -> Mapping[str, Any]:
    """Return `state.json`; where it cannot be read, what the run's other files say instead."""
    if found.state_trouble is None:
        return found.state or {}
    run = found.settings.get("run")
    total = whole_number(run, "steps") if isinstance(run, dict) else None
    best = LossHistory([], list(found.validations)).best
    last = found.steps[-1] if found.steps else StepPoint(0)
    return {
        "step": last.step,
        "total_steps": total,
        "loss": last.loss,
        "best_loss": None if best is None else best.loss,
        "best_step": None if best is None else best.step,
        "seconds": last.seconds_trained,
        "cost_usd": last.cost_usd,
    }


def _last_step(steps: Sequence[StepPoint], state: Mapping[str, Any]) -> StepPoint | None:
    """Return the newest figures, unless they are those of a session before this one.

    A session writes the state once before its first logged step, without a speed.
    """
    if not steps or (state.get("status") == "training" and "tokens_per_second" not in state):
        return None
    return steps[-1]


def _status(found: Findings, state: Mapping[str, Any], *, now: float) -> Status:
    said = text(state, "status")
    if found.state is None:
        return "starting" if found.state_trouble is None else "unknown"
    if said != "training":
        return _ENDED.get(said or "", "unknown")
    if found.liveness == "gone":
        return "crashed"
    return "silent" if _is_silent(found, state, now=now) else "training"


def _is_silent(found: Findings, state: Mapping[str, Any], *, now: float) -> bool:
    """Whether a step is overdue; after the last one the model is written, which has no lines."""
    updated = unix_time(state.get("updated"))
    if updated is None or state.get("step") == state.get("total_steps"):
        return False
    began = unix_time(state.get("session_began")) or 0.0
    times = [step.time for step in found.steps[-RECENT_STEPS:] if step.time is not None]
    logged = [time for time in times if time >= began]
    return silence(logged, began=updated, now=now).is_too_long


def seconds_left(
    steps: Sequence[StepPoint], *, passed: float = 0.0, resumes_from: int | None = None
) -> float | None:
    """Return what is left by what training expected at its last line; None: unknown, or over.

    Args:
        steps: The logged steps.
        passed: Seconds since the last one, of a run that trains.
        resumes_from: Of a run that ended early: the step that it would go on from. Those after it
            are to be made again, at the mean pace of the last lines.
    """
    if not steps or steps[-1].seconds_left is None:
        return None
    left = steps[-1].seconds_left - passed
    if resumes_from is not None:
        left += (steps[-1].step - resumes_from) * (mean_step_seconds(steps[-RECENT_STEPS:]) or 0.0)
    return left if left >= 0 else None


def mean_step_seconds(steps: Sequence[StepPoint]) -> float | None:
    """Return the mean time of a step over some lines; None: none tells."""
    found = [one.step_seconds for one in steps if one.step_seconds is not None]
    return statistics.fmean(found) if found else None


def mean_tokens_per_second(steps: Sequence[StepPoint]) -> float | None:
    """Return the tokens of some lines by the time that they took; None: none tells."""
    found = [speed for one in steps if (speed := one.tokens_per_second or 0.0) > 0]
    return statistics.harmonic_mean(found) if found else None


def _note(found: Findings, status: Status) -> str:
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


def _saves(found: Findings, step: int, last: StepPoint | None, *, now: float) -> Saves:
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


def _mirror(status: Mapping[str, Any]) -> Mirror:
    def steps(name: str) -> list[int]:
        value = status.get(name)
        return [one for one in value if isinstance(one, int)] if isinstance(value, list) else []

    total = number(status, "total_bytes")
    failed = status.get("failed")
    return Mirror(
        bucket=text(status, "bucket") or "?",
        newest_step=max(steps("mirrored"), default=None),
        waiting=len(steps("waiting")),
        uploading_fraction=(number(status, "done_bytes") or 0.0) / total if total else None,
        failed=len(failed) if isinstance(failed, dict) else 0,
        last_error=text(status, "last_error"),
    )


def _plus(value: float | None, more: float) -> float | None:
    return None if value is None else value + more
