"""A run's time and cost so far, and what is left, from its files."""

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from refocused.commands.run_selection import whole_steps
from refocused.config.prices import cost_usd, usd_per_million_tokens
from refocused.metrics.history import METRICS_FILE
from refocused.metrics.jsonl import JsonLinesTail, number
from refocused.metrics.run_time import PERFORMANCE_FILE, RunTime
from refocused.monitor.run_reader import RunReader, RunView
from refocused.system.errors import RefocusedError, as_typed, counted
from refocused.system.number_text import count_text, dollars, duration, known, moment

_NEEDED = {"run", "step", "total_steps", "tokens", "seconds", "cost_usd", "updated"}


_OF_VIEW = ("name", "status", "step", "step_seconds", "tokens_per_second", "resumes_from")


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run as the monitor shows it, with the given price, and what else a report needs."""

    view: RunView
    used: RunTime
    total_steps: int
    tokens: int  # those of repeated steps counted once
    seconds_trained: float  # of all sessions, start-up and repeated steps included
    cost_usd: float | None  # of that time; None is unknown, as below
    seconds_left: float | None  # from `resumes_from`, as of the last log line
    cost_left_usd: float | None
    budget_step: int | None  # last step within the budget; None also if it is exceeded
    validation_seconds: float | None  # mean
    save_seconds: float | None  # mean time that a save stopped training for

    def as_record(self) -> dict[str, Any]:
        """Return the figures for JSON, those of the view over its last lines."""
        record = {name: getattr(self.view, name) for name in _OF_VIEW}
        figures = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[2:]}
        cost, left, cost_left = self.cost_usd, self.seconds_left, self.cost_left_usd
        return record | {
            **figures,
            "sessions": max(1, self.used.sessions),  # number of starts
            "usd_per_million_tokens": usd_per_million_tokens(cost, self.tokens),
            # productive share of the time since the first start, and where the time went
            "goodput_fraction": self.used.goodput_fraction,
            "time_line": self.used.as_line() if self.used.sessions else "",
            "total_usd": None if cost is None or cost_left is None else cost + cost_left,
            "ends": self.view.now + left if left else None,  # Unix time, without interruption
            "budget_usd": self.view.budget_usd,
        }

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield what is printed, with a name for each line."""
        view, cost, left = self.view, self.cost_usd, self.seconds_left
        steps = f"step {view.step:,} of {self.total_steps:,}"
        yield "run", f"{view.name}: {steps}, {count_text(self.tokens)} tokens, {view.status}"
        spent = known("${:,.2f}", cost) or "price unknown: set --per-hour"
        spent += known(", ${:,.4f} a million tokens", usd_per_million_tokens(cost, self.tokens))
        sessions = counted(max(1, self.used.sessions), "session")
        yield "so far", f"{duration(self.seconds_trained)} in {sessions}, {spent}"
        if self.used.sessions:
            yield "time", self.used.as_line()
        if view.step_seconds is not None:
            validation = self.validation_seconds
            parts = (
                known("{:.3g} s a step", view.step_seconds),
                known("{:,.0f} tokens/s", view.tokens_per_second),
                "" if validation is None else f"{duration(validation)} a validation",
                known("{:.2g} s a save", self.save_seconds),
            )
            yield "measured", ", ".join(filter(None, parts)) + " (means)"
        if left:
            money = known(",{}", dollars(self.cost_left_usd) or None)
            text = f"{duration(left)}{money}, ends {moment(view.now + left)}"
            if (step := view.resumes_from) is not None:
                text += f" if resumed now from {f'checkpoint {step:,}' if step else 'the start'}"
            yield "left", text
            if cost is not None and self.cost_left_usd is not None:
                yield "in all", f"${cost + self.cost_left_usd:,.2f}"
        if (budget := view.budget_usd) is not None:
            answer = "its last step is known with --per-hour and after the first steps"
            if cost is not None and cost > budget:
                answer = f"exceeded by ${cost - budget:,.2f}"
            elif (reached := self.budget_step) is not None:
                is_enough = reached >= self.total_steps
                answer = "sufficient" if is_enough else f"reached at step {reached:,}"
            yield "budget", f"${budget:,.2f}: {answer}"


def measure(
    run: Path, *, per_hour_usd: float | None, budget_usd: float | None, now: float
) -> MeasuredRun:
    """Read the files in a run's folder at a Unix time.

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
    given = {"cost.per_hour_usd": per_hour_usd, "cost.budget_usd": budget_usd}
    given = {name: usd for name, usd in given.items() if usd is not None}
    view = dataclasses.replace(view, settings={**view.settings, **given})
    seconds = max(state["seconds"], used.seconds_trained or 0.0)
    cost = max((usd for usd in (state["cost_usd"], used.cost_usd) if usd is not None), default=None)
    if per_hour_usd is not None or cost is None:
        cost = cost_usd(seconds, view.per_hour_usd)
    left = 0.0 if view.status == "finished" else view.seconds_left
    cost_left = cost_usd(left, view.per_hour_usd)
    budget, step, total = view.budget_usd, view.resumes_from, state["total_steps"]
    budget_step = None
    if cost is not None and cost_left is not None and budget and budget >= cost:
        step = view.step if step is None else step
        share = min(1.0, (budget - cost) / cost_left) if cost_left > 0 else 1.0
        budget_step = step + int((total - step) * share)  # at a constant cost per step
    return MeasuredRun(
        view,
        used,
        total_steps=total,
        tokens=state["tokens"],
        seconds_trained=seconds,
        cost_usd=cost,
        seconds_left=left,
        cost_left_usd=cost_left,
        budget_step=budget_step,
        validation_seconds=_mean(run / METRICS_FILE, "validation", "seconds"),
        save_seconds=_mean(run / PERFORMANCE_FILE, "save", "save_stall_seconds"),
    )


def _mean(file: Path, kind: str, name: str) -> float | None:
    lines = JsonLinesTail(file).records()
    values = [number(record, name) for record in lines if record.get("kind") == kind]
    measured = [value for value in values if value is not None]
    return statistics.fmean(measured) if measured else None
