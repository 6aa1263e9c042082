"""Read a run's time and cost so far, and what is left, from its files."""

import datetime
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from refocused.commands.output import count_text
from refocused.commands.run_selection import whole_steps
from refocused.config.load_run import read_run
from refocused.config.prices import cost_usd, usd_per_million_tokens
from refocused.metrics.history import METRICS_FILE
from refocused.metrics.jsonl import JsonLinesTail, Record, number
from refocused.metrics.run_time import PERFORMANCE_FILE, RunTimes
from refocused.metrics.step_metrics import duration
from refocused.monitor.run_reader import RunReader
from refocused.monitor.run_status import mean_step_seconds, mean_tokens_per_second, view_of
from refocused.system.errors import RefocusedError, as_typed, counted

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
    found = RunReader(run, saved_steps=whole_steps, recent_only=True).read()
    state = found.state
    if found.state_trouble is not None:
        raise RefocusedError(
            f"{run}/state.json cannot be read: {found.state_trouble}. `{as_typed('monitor')} {run} "
            "--once` shows what the run's other files say."
        )
    if state is None or not state.keys() >= _NEEDED:
        raise RefocusedError(
            f"{run}/state.json is missing or is not a run's; training writes it. Name another "
            "run, or estimate a run that has not started with --config FILE."
        )
    config = read_run(run / "run.yaml")
    typed_usd, per_hour_usd = per_hour_usd, per_hour_usd or config.cost.per_hour_usd
    budget_usd = budget_usd or config.cost.budget_usd
    records = JsonLinesTail(run / PERFORMANCE_FILE).records()
    metrics = JsonLinesTail(run / METRICS_FILE).records()
    used, view = RunTimes(records).run_time, view_of(found, now=now)
    step, total, tokens = state["step"], state["total_steps"], state["tokens"]
    seconds = max(state["seconds"], used.seconds_trained or 0.0)
    known = [cost for cost in (state["cost_usd"], used.cost_usd) if cost is not None]
    cost = max(known) if known and typed_usd is None else cost_usd(seconds, per_hour_usd)
    begin = step if view.resumes_from is None else view.resumes_from
    left = 0.0 if view.status == "finished" else view.seconds_left
    cost_left = cost_usd(left, per_hour_usd)
    budget_step = None
    unspent = None if budget_usd is None or cost is None else budget_usd - cost
    if unspent is not None and unspent >= 0 and cost_left is not None:
        share = min(1.0, unspent / cost_left) if cost_left > 0 else 1.0
        budget_step = begin + int((total - begin) * share)  # at a constant cost per step
    return {
        "name": state["run"],
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
        "step_seconds": mean_step_seconds(found.steps),  # over the last lines
        # over the same lines, validations and saves included
        "tokens_per_second": mean_tokens_per_second(found.steps),
        "validation_seconds": _mean(metrics, "validation", "seconds"),
        # that a save stopped training for
        "save_seconds": _mean(records, "save", "save_stall_seconds"),
        "resumes_from": view.resumes_from,  # step that a run which ended early resumes from
        "seconds_left": left,  # from there, as of the last log line
        "cost_left_usd": cost_left,
        "total_usd": cost + cost_left if cost is not None and cost_left is not None else None,
        "ends": now + left if left else None,  # Unix time, if training is not interrupted
        "budget_usd": budget_usd,
        "budget_step": budget_step,  # last step within the budget; None also if it is exceeded
    }


def _mean(records: Sequence[Record], kind: str, name: str) -> float | None:
    found = [number(record, name) for record in records if record.get("kind") == kind]
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known else None


def measured_spec(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is printed about a run, with a name for each line."""
    steps = "step {step:,} of {total_steps:,}".format_map(found)
    tokens = f"{count_text(found['tokens'])} tokens"
    yield "run", f"{found['name']}: {steps}, {tokens}, {found['status']}"
    cost, each = found["cost_usd"], found["usd_per_million_tokens"]
    spent = "price unknown: set --per-hour"
    if cost is not None:
        spent = f"${cost:,.2f}" + (f", ${each:,.4f} a million tokens" if each else "")
    sessions = counted(found["sessions"], "session")
    yield "so far", f"{duration(found['seconds_trained'])} in {sessions}, {spent}"
    if found["time_line"]:
        yield "time", found["time_line"]
    if found["step_seconds"] is not None:
        parts = [f"{found['step_seconds']:.3g} s a step"]
        if found["tokens_per_second"] is not None:
            parts.append(f"{found['tokens_per_second']:,.0f} tokens/s")
        if found["validation_seconds"] is not None:
            parts.append(f"{duration(found['validation_seconds'])} a validation")
        if found["save_seconds"] is not None:
            parts.append(f"{found['save_seconds']:.2g} s a save")
        yield "measured", ", ".join(parts) + " (means)"
    if found["seconds_left"] is not None and found["seconds_left"] > 0:
        left = duration(found["seconds_left"])
        if found["cost_left_usd"] is not None:
            left += f", ${found['cost_left_usd']:,.2f}"
        if found["ends"]:
            ends = datetime.datetime.fromtimestamp(found["ends"], datetime.UTC)
            left += f", ends {ends:%a %d %b %H:%M} UTC"
        if (step := found["resumes_from"]) is not None:
            left += f" if resumed now from {f'checkpoint {step:,}' if step else 'the start'}"
        yield "left", left
        if found["total_usd"] is not None:
            yield "in all", f"${found['total_usd']:,.2f}"
    budget, reached = found["budget_usd"], found["budget_step"]
    if budget is not None:
        text = "its last step is known with --per-hour and after the first steps"
        if cost is not None and cost > budget:
            text = f"exceeded by ${cost - budget:,.2f}"
        elif reached is not None:
            is_enough = reached >= found["total_steps"]
            text = "sufficient" if is_enough else f"reached at step {reached:,}"
        yield "budget", f"${budget:,.2f}: {text}"
