"""The alarm rules for the run: its steps, its loss, its mirror and its money."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from refocused.config.outputs import CostConfig
from refocused.metrics.step_metrics import duration
from refocused.monitor.readings import Severity
from refocused.monitor.run_reader import Mirror, RunFiles
from refocused.monitor.run_status import logged_times, longest_silence
from refocused.monitor.sampler.alarms import Reading, bad_above, bad_below, bad_if

SUBJECT = "run"
FEWEST_LOSSES = 20
SPIKE_NATS, SPIKE_DEVIATIONS = 0.5, 6.0
DEVIATION = 1.4826  # times the median absolute deviation of a normal distribution: a standard one
MIRROR_SECONDS = 300.0
MIRROR_STEPS_BEHIND = 3
CREDIT_HOURS = 2.0


def is_training(run: RunFiles, *, began: float, alive: bool) -> bool:
    """Whether a run takes steps: it says so, has taken one in this session, and has some left.

    Args:
        run: What its files say.
        began: When watching it began, in Unix seconds.
        alive: Whether the process that trains runs.
    """
    state = run.state or {}
    is_last = state.get("step") is not None and state.get("step") == state.get("total_steps")
    is_stepping = alive and state.get("status") == "training" and not is_last
    return is_stepping and bool(logged_times(run.steps, since=began))


def run_readings(
    run: RunFiles, cost: CostConfig, *, began: float, alive: bool, now: float
) -> Iterator[Reading]:
    """Return what the rules find of a run; arguments as above."""
    state = run.state or {}
    status, step = state.get("status"), state.get("step")
    died = status == "training" and not alive
    yield from bad_if(
        "run_died",
        SUBJECT,
        died,
        f"the process that trains has ended at step {step or 0:,} without saying why, as one does "
        "that is killed; its last words are in logs/rank-0.log.",
        severity="critical",
    )
    has_steps_left = step is None or step != state.get("total_steps")
    if not died:  # a killed process has not taken its next step either
        logged = logged_times(run.steps, since=began)
        silent, longest = max(0.0, now - (logged[-1] if logged else began)), longest_silence(logged)
        is_late = status == "training" and has_steps_left and silent > longest
        late = (
            f"; the next one was due within {duration(longest)}. A rank may hang: see "
            "logs/rank-N.log of every rank."
        )
        text = f"step {step or 0:,} was logged {duration(silent)} ago{late if is_late else '.'}"
        yield from bad_if("no_step", SUBJECT, is_late, text, severity="critical")
    yield from _loss(run)
    # While the status is that of an earlier session, what the mirror wrote may be of that one too.
    if run.mirror is not None and (status == "training" or not alive):
        yield from _mirror(run.mirror, now)
    if state.get("cost_usd") is not None:
        yield from _money(run, cost, state["cost_usd"], has_steps_left=has_steps_left)


def _loss(run: RunFiles) -> Iterator[Reading]:
    logged = [point for point in run.steps if point.time is not None]
    if not logged:
        return
    last = logged[-1]
    value = "not finite" if last.loss is None else f"{last.loss:.4f}"
    text = f"the loss of step {last.step:,} is {value}"
    yield from bad_if("non_finite", SUBJECT, last.loss is None, f"{text}.", severity="critical")
    before = [point.loss for point in logged[:-1] if point.loss is not None]
    if last.loss is None or len(before) < FEWEST_LOSSES:
        return
    median = statistics.median(before)
    spread = DEVIATION * statistics.median(abs(loss - median) for loss in before)
    jump = max(SPIKE_NATS, SPIKE_DEVIATIONS * spread)
    yield from bad_above(
        "loss_spike",
        SUBJECT,
        last.loss - median,
        (jump, jump / 2),
        text=f"{text}, the median of the {len(before)} logged before it {median:.4f}.",
    )


def _mirror(mirror: Mirror, now: float) -> Iterator[Reading]:
    if mirror.heartbeat is None:
        return
    error = mirror.last_error
    yield from bad_if(
        "mirror_failing",
        SUBJECT,
        error is not None,
        "the mirror writes." if error is None else f"the mirror cannot write: {error}",
        raised_after_seconds=MIRROR_SECONDS,
    )
    yield from bad_above(
        "mirror_behind",
        SUBJECT,
        mirror.waiting,
        (MIRROR_STEPS_BEHIND, 1),
        text=f"{mirror.waiting} steps wait to be mirrored: the link to the bucket is too slow for "
        "checkpoint.interval, or down.",
        raised_after_seconds=60.0,
    )
    silent = max(0.0, now - mirror.heartbeat)
    yield from bad_above(
        "mirror_silent",
        SUBJECT,
        0.0 if mirror.drained else silent,
        (MIRROR_SECONDS, MIRROR_SECONDS / 2),
        text=f"the mirror last said something {duration(silent)} ago; see logs/mirror.log.",
    )


def _money(
    run: RunFiles, cost: CostConfig, spent: float, *, has_steps_left: bool
) -> Iterator[Reading]:
    if cost.budget_usd is not None:  # at 100 % the run itself saves and stops
        share = spent / cost.budget_usd
        text = f"the run has cost ${spent:,.2f}, {share:.0%} of ${cost.budget_usd:,.2f}."
        marks: list[tuple[str, float, Severity]] = [
            ("budget_80", 0.80, "warning"),
            ("budget_95", 0.95, "critical"),
        ]
        for name, mark, severity in marks:
            yield from bad_if(name, SUBJECT, share >= mark, text, severity=severity)
    if cost.credit_usd is None or not cost.per_hour_usd:
        return
    left = cost.credit_usd - spent
    hours = left / cost.per_hour_usd
    lasts = f"the credit lasts for {max(0.0, hours):.1f} h"
    rest = run.steps[-1].cost_left_usd if run.steps else None
    if rest is not None:
        share = (rest / left if left > 0 else float("inf")) if has_steps_left else 0.0
        yield from bad_above(
            "credit_short",
            SUBJECT,
            share,
            (1.0, 0.95),
            text=f"{lasts} (${left:,.2f}), the rest of the run takes "
            f"{rest / cost.per_hour_usd:.1f} h (${rest:,.2f}).",
        )
    yield from bad_below(
        "credit_ending",
        SUBJECT,
        hours if has_steps_left else float("inf"),
        (CREDIT_HOURS, 1.25 * CREDIT_HOURS),
        text=f"{lasts} more: then the machine is taken away.",
        severity="critical",
    )
