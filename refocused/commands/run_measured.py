"""What a run has taken and has left, from its own files."""

from __future__ import annotations

import dataclasses
import datetime
import socket
from pathlib import Path
from typing import Any

from refocused.commands.run_catalog import whole_steps
from refocused.config.decode import read_run
from refocused.config.outputs import CheckpointConfig, EvaluationConfig
from refocused.config.prices import cost_usd, usd_per_million_tokens
from refocused.errors import RefocusedError
from refocused.estimate.run_cost import times_left
from refocused.monitoring.history import METRICS_FILE
from refocused.monitoring.pace import Pace, measured_pace
from refocused.monitoring.performance import PERFORMANCE_FILE, RunTime, run_time
from refocused.monitoring.run_findings import resume_step
from refocused.monitoring.tail import JsonLinesTail, read_json, read_small
from refocused.process_identity import ProcessIdentity

_NEEDED = {"run", "step", "total_steps", "tokens", "seconds", "cost_usd", "updated"}


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A run that trains or has trained; None is unknown.

    Attributes:
        name: Of the run.
        status: `training`, `stopped`, `finished`, `failed`, or `crashed`: it says that it trains,
            and its process is gone.
        step: Steps made.
        total_steps: Of the whole run.
        tokens: Trained on.
        sessions: How often it was started.
        seconds_trained: Of all sessions, from their begin, rewinds included.
        cost_usd: Of that time.
        usd_per_million_tokens: Of the tokens that the run has kept.
        goodput_fraction: Productive share of the time since the first start.
        time_line: Where the time went, for a person; empty where nothing tells.
        step_seconds: Median.
        tokens_per_second: By that median.
        validation_seconds: Median.
        save_seconds: Median of the time that training stood still for.
        resumes_from: Of a run that ended early: the step of the checkpoint that it would go on
            from, 0: anew. What is left is counted from there.
        seconds_left: Until the last step, with validations and saves at their frequency.
        cost_left_usd: Of that time.
        total_usd: So far and left together.
        ends: When it is done if it goes on without a pause, in Unix seconds.
        budget_usd: What the run may cost.
        budget_step: The step that this pays for, at most the last one; None also where more than
            this is spent.
    """

    name: str
    status: str
    step: int
    total_steps: int
    tokens: int
    sessions: int
    seconds_trained: float
    cost_usd: float | None
    usd_per_million_tokens: float | None
    goodput_fraction: float | None
    time_line: str
    step_seconds: float | None
    tokens_per_second: float | None
    validation_seconds: float | None
    save_seconds: float | None
    resumes_from: int | None
    seconds_left: float | None
    cost_left_usd: float | None
    total_usd: float | None
    ends: float | None
    budget_usd: float | None
    budget_step: int | None

    def as_record(self) -> dict[str, Any]:
        """Return it for JSON."""
        return dataclasses.asdict(self)


def measure(
    run: Path, *, per_hour_usd: float | None, budget_usd: float | None, now: float
) -> Measured:
    """Read a run's files.

    Args:
        run: Its folder.
        per_hour_usd: Price of the machine; None: the run's own.
        budget_usd: What it may cost; None: the run's own.
        now: Unix seconds.

    Raises:
        RefocusedError: The folder holds no run that has trained.
    """
    found = read_small(run / "state.json")
    state = found.content
    if found.trouble is not None:
        raise RefocusedError(
            f"{run}/state.json cannot be read: {found.trouble}. `launch/monitor.py {run} --once` "
            "shows what the run's other files say."
        )
    if state is None or not state.keys() >= _NEEDED:
        raise RefocusedError(
            f"{run}/state.json is missing or not a run's: a run writes it when it trains. Name "
            "another run, or estimate one before it begins: --config FILE."
        )
    config = read_run(run / "run.yaml")
    records = JsonLinesTail(run / PERFORMANCE_FILE).records()
    metrics = JsonLinesTail(run / METRICS_FILE).records()
    events = JsonLinesTail(run / "logs" / "events.jsonl").records()
    samples = [event for event in events if event.get("kind") == "sample"]
    return figures(
        state,
        status=_status(state),
        checkpoint_step=resume_step(
            whole_steps(run / "checkpoints"), read_json(run / "mirror.json")
        ),
        used=run_time(records),
        pace=measured_pace([*records, *metrics, *samples]),
        evaluation=config.evaluation,
        checkpoint=config.checkpoint,
        per_hour_usd=per_hour_usd or config.cost.per_hour_usd,
        budget_usd=budget_usd or config.cost.budget_usd,
        now=now,
    )


def figures(
    state: dict[str, Any],
    *,
    status: str,
    checkpoint_step: int,
    used: RunTime,
    pace: Pace,
    evaluation: EvaluationConfig,
    checkpoint: CheckpointConfig,
    per_hour_usd: float | None,
    budget_usd: float | None,
    now: float,
) -> Measured:
    """Compute what a run has taken and has left.

    Args:
        state: `state.json`.
        status: Of the run.
        checkpoint_step: Step of its newest checkpoint; 0: there is none.
        used: Where its time went.
        pace: How fast it is.
        evaluation: When it validates.
        checkpoint: When it saves.
        per_hour_usd: Price of the machine from now on, and of the time whose cost is not known.
        budget_usd: What it may cost.
        now: Unix seconds.
    """
    step, total, tokens = state["step"], state["total_steps"], state["tokens"]
    seconds = max(state["seconds"], used.seconds_trained or 0.0)
    known = [cost for cost in (state["cost_usd"], used.cost_usd) if cost is not None]
    cost = max(known) if known else cost_usd(seconds, per_hour_usd)
    resumes_from = None if status in ("training", "finished") else checkpoint_step
    begin = step if resumes_from is None else resumes_from
    left = pace.seconds_left(
        steps=max(0, total - begin),
        validations=times_left(begin, total, evaluation.interval),
        saves=times_left(begin, total, checkpoint.interval),
        tasks=times_left(begin, total, evaluation.task_interval) if evaluation.tasks else 0,
        samples=max(0, times_left(begin, total, evaluation.sample_interval) - 1),
    )
    if left is not None and status == "training":
        left = max(0.0, left - max(0.0, now - _unix_seconds(state["updated"])))
    cost_left = cost_usd(left, per_hour_usd)
    return Measured(
        name=state["run"],
        status=status,
        step=step,
        total_steps=total,
        tokens=tokens,
        sessions=max(1, used.sessions),
        seconds_trained=seconds,
        cost_usd=cost,
        usd_per_million_tokens=usd_per_million_tokens(cost, tokens),
        goodput_fraction=used.goodput_fraction,
        time_line=used.as_line() if used.sessions else "",
        step_seconds=pace.step_seconds,
        tokens_per_second=tokens / step / pace.step_seconds if step and pace.step_seconds else None,
        validation_seconds=pace.validation_seconds,
        save_seconds=pace.save_seconds,
        resumes_from=resumes_from,
        seconds_left=left,
        cost_left_usd=cost_left,
        total_usd=cost + cost_left if cost is not None and cost_left is not None else None,
        ends=now + left if left else None,
        budget_usd=budget_usd,
        budget_step=_budget_step(begin, total, cost=cost, left=cost_left, budget_usd=budget_usd),
    )


def _budget_step(
    step: int, total: int, *, cost: float | None, left: float | None, budget_usd: float | None
) -> int | None:
    """Return the step that a budget pays for, at an even pace from here."""
    if budget_usd is None or cost is None or left is None or cost > budget_usd:
        return None
    if left <= 0:
        return total
    share = min(1.0, (budget_usd - cost) / left)
    return step + int((total - step) * share)


def _status(state: dict[str, Any]) -> str:
    """Return the run's status; one whose process is gone without a word has crashed."""
    status = str(state.get("status", "unknown"))
    if status != "training" or state.get("host") != socket.gethostname():
        return status
    process = ProcessIdentity.model_validate(
        {"pid": state.get("pid", 0), "started": state.get("pid_started", 0)}
    )
    return status if process.alive else "crashed"


def _unix_seconds(moment: str) -> float:
    return datetime.datetime.fromisoformat(moment).timestamp()
