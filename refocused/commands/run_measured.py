"""Read a run's time and cost so far, and what is left, from its files."""

import datetime
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from refocused.commands.run_selection import whole_steps
from refocused.config.prices import cost_usd, usd_per_million_tokens
from refocused.metrics.history import METRICS_FILE
from refocused.metrics.jsonl import JsonLinesTail, Record, number
from refocused.metrics.run_time import PERFORMANCE_FILE, RunTime
from refocused.monitor.run_reader import RunReader
from refocused.system.errors import RefocusedError, as_typed, counted
from refocused.system.number_text import count_text, dollars, duration, known

_NEEDED = {"run", "step", "total_steps", "tokens", "seconds", "cost_usd", "updated"}


def measure(
    run: Path, *, per_hour_usd: float | None, budget_usd: float | None, now: float
) -> dict[str, Any]:
    """Read the files in a run's folder at a Unix time; return its figures. None is unknown.

    Without a price or a budget those of the run file hold. A price that is given holds for the
    time so far, too; else that costs what the run recorded.

    Raises:
        RefocusedError: The folder holds no run that has trained.
    """
    view = RunReader(run, saved_steps=whole_steps).read(now)
    state, used = view.state or {}, view.used or RunTime()
    if view.state_trouble is not None:
        raise RefocusedError(
            f"{run}/state.json cannot be read: {view.state_trouble}. `{as_typed('monitor')} {run} "
            "--once` shows what the run's other files say."
        )
    if not state.keys() >= _NEEDED:
        raise RefocusedError(
            f"{run}/state.json is missing or is not a run's; training writes it. Name another "
            "run, or estimate a run that has not started with --config FILE."
        )
    step, total, tokens = state["step"], state["total_steps"], state["tokens"]
    seconds = max(state["seconds"], used.seconds_trained or 0.0)
    cost = max((usd for usd in (state["cost_usd"], used.cost_usd) if usd is not None), default=None)
    if per_hour_usd is not None or cost is None:
        cost = cost_usd(seconds, per_hour_usd or view.per_hour_usd)
    left = 0.0 if view.status == "finished" else view.seconds_left
    cost_left = cost_usd(left, per_hour_usd or view.per_hour_usd)
    budget_step, budget_usd = None, budget_usd or view.budget_usd
    if cost is not None and cost_left is not None and budget_usd and budget_usd >= cost:
        begin = step if view.resumes_from is None else view.resumes_from
        share = min(1.0, (budget_usd - cost) / cost_left) if cost_left > 0 else 1.0
        budget_step = begin + int((total - begin) * share)  # at a constant cost per step
    metrics = JsonLinesTail(run / METRICS_FILE).records()
    times = JsonLinesTail(run / PERFORMANCE_FILE).records()
    return {
        "name": view.name,
        "status": view.status,  # as the monitor shows it
        "step": step,
        "total_steps": total,
        "tokens": tokens,
        "sessions": max(1, used.sessions),  # number of starts
        "seconds_trained": seconds,  # of all sessions, start-up and repeated steps included
        "cost_usd": cost,  # of that time
        # tokens of repeated steps counted once
        "usd_per_million_tokens": usd_per_million_tokens(cost, tokens),
        # productive share of the time since the first start
        "goodput_fraction": used.goodput_fraction,
        "time_line": used.as_line() if used.sessions else "",  # where the time went
        "step_seconds": view.step_seconds,  # over the last lines
        # over the same lines, validations and saves included
        "tokens_per_second": view.tokens_per_second,
        "validation_seconds": _mean(metrics, "validation", "seconds"),
        # that a save stopped training for
        "save_seconds": _mean(times, "save", "save_stall_seconds"),
        "resumes_from": view.resumes_from,  # step that a run which ended early resumes from
        "seconds_left": left,  # from there, as of the last log line
        "cost_left_usd": cost_left,
        "total_usd": None if cost is None or cost_left is None else cost + cost_left,
        "ends": now + left if left else None,  # Unix time, if training is not interrupted
        "budget_usd": budget_usd,
        "budget_step": budget_step,  # last step within the budget; None also if it is exceeded
    }


def _mean(records: Sequence[Record], kind: str, name: str) -> float | None:
    values = [number(record, name) for record in records if record.get("kind") == kind]
    measured = [value for value in values if value is not None]
    return statistics.fmean(measured) if measured else None


def measured_spec(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is printed about a run, with a name for each line."""
    steps = f"step {run['step']:,} of {run['total_steps']:,}"
    yield "run", f"{run['name']}: {steps}, {count_text(run['tokens'])} tokens, {run['status']}"
    cost, price = run["cost_usd"], run["usd_per_million_tokens"]
    spent = known("${:,.2f}", cost) or "price unknown: set --per-hour"
    spent += known(", ${:,.4f} a million tokens", price or None)
    sessions = counted(run["sessions"], "session")
    yield "so far", f"{duration(run['seconds_trained'])} in {sessions}, {spent}"
    if run["time_line"]:
        yield "time", run["time_line"]
    if run["step_seconds"] is not None:
        validation = run["validation_seconds"]
        parts = (
            known("{:.3g} s a step", run["step_seconds"]),
            known("{:,.0f} tokens/s", run["tokens_per_second"]),
            "" if validation is None else f"{duration(validation)} a validation",
            known("{:.2g} s a save", run["save_seconds"]),
        )
        yield "measured", ", ".join(filter(None, parts)) + " (means)"
    if run["seconds_left"]:
        ends = datetime.datetime.fromtimestamp(run["ends"], datetime.UTC)
        left = known(",{}", dollars(run["cost_left_usd"]) or None)
        left = f"{duration(run['seconds_left'])}{left}, ends {ends:%a %d %b %H:%M} UTC"
        if (step := run["resumes_from"]) is not None:
            left += f" if resumed now from {f'checkpoint {step:,}' if step else 'the start'}"
        yield "left", left
        if run["total_usd"] is not None:
            yield "in all", f"${run['total_usd']:,.2f}"
    budget, reached = run["budget_usd"], run["budget_step"]
    if budget is not None:
        answer = "its last step is known with --per-hour and after the first steps"
        if cost is not None and cost > budget:
            answer = f"exceeded by ${cost - budget:,.2f}"
        elif reached is not None:
            is_enough = reached >= run["total_steps"]
            answer = "sufficient" if is_enough else f"reached at step {reached:,}"
        yield "budget", f"${budget:,.2f}: {answer}"
