"""The rules for the run: steps that do not come, a loss that jumps, a mirror or money behind."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from refocused.metrics.step_metrics import duration
from refocused.monitor.readings import Severity
from refocused.monitor.run_reader import LoggedStep, MirrorSight, RunSight
from refocused.monitor.run_status import silence
from refocused.monitor.sampler.alarms import Reading, level_above, level_below

SUBJECT = "run"
FEWEST_LOSSES = 20
SPIKE_NATS, SPIKE_DEVIATIONS = 0.5, 6.0
DEVIATION = 1.4826  # of the median absolute deviation of a normal distribution, a standard one
MIRROR_PATIENCE_SECONDS = 300.0
MIRROR_STEPS_BEHIND = 3
CREDIT_HOURS = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Money:
    """What was set about money; None: not.

    Attributes:
        per_hour_usd: Price of the machine.
        budget_usd: What the run may cost.
        credit_usd: What was on the provider's account when the run first began.
    """

    per_hour_usd: float | None = None
    budget_usd: float | None = None
    credit_usd: float | None = None


def run_readings(run: RunSight, money: Money, *, now: float) -> Iterator[Reading]:
    """Return what the rules say of a run; `now` is in seconds of Unix time."""
    died = run.status == "training" and not run.alive
    yield Reading(
        "run_died",
        SUBJECT,
        "bad" if died else "good",
        f"the process that trains has ended at step {run.step or 0:,} without saying why, as one "
        "does that is killed; its last words are in logs/rank-0.log.",
        "critical",
    )
    if not died:  # one that was killed has not taken its next step either
        yield from _pace(run, now)
    yield from _loss(run.logged)
    # While the status is that of an earlier session, what the mirror said may be of that one too.
    if run.mirror is not None and (run.status == "training" or not run.alive):
        yield from _mirror(run.mirror, now)
    yield from _budget(run, money)
    yield from _credit(run, money)


def _pace(run: RunSight, now: float) -> Iterator[Reading]:
    waited = silence([logged.at for logged in run.logged_now], began=run.began, now=now)
    steps_come = run.status == "training" and run.step != run.total_steps
    is_late = steps_come and waited.is_too_long
    yield Reading(
        "no_step",
        SUBJECT,
        "bad" if is_late else "good",
        f"step {run.step or 0:,} was logged {duration(waited.seconds)} ago"
        + (
            f"; the next one was due within {duration(waited.longest_seconds)}. A rank may hang: "
            "see logs/rank-N.log of every rank."
            if is_late
            else "."
        ),
        "critical",
    )


def _loss(logged: Sequence[LoggedStep]) -> Iterator[Reading]:
    if not logged:
        return
    last = logged[-1]
    yield Reading(
        "non_finite",
        SUBJECT,
        "bad" if last.loss is None else "good",
        f"the loss of step {last.step:,} is "
        + ("not finite." if last.loss is None else f"{last.loss:.4f}."),
        "critical",
    )
    before = [point.loss for point in logged[:-1] if point.loss is not None]
    if last.loss is None or len(before) < FEWEST_LOSSES:
        return
    median = statistics.median(before)
    spread = DEVIATION * statistics.median(abs(loss - median) for loss in before)
    jump = max(SPIKE_NATS, SPIKE_DEVIATIONS * spread)
    yield Reading(
        "loss_spike",
        SUBJECT,
        level_above(last.loss - median, bad=jump, good=jump / 2),
        f"the loss of step {last.step:,} is {last.loss:.4f}, the median of the {len(before)} "
        f"logged before it {median:.4f}.",
    )


def _mirror(mirror: MirrorSight, now: float) -> Iterator[Reading]:
    yield Reading(
        "mirror_failing",
        SUBJECT,
        "good" if mirror.last_error is None else "bad",
        f"the mirror cannot write: {mirror.last_error}"
        if mirror.last_error is not None
        else "the mirror writes.",
        raised_after_seconds=MIRROR_PATIENCE_SECONDS,
    )
    yield Reading(
        "mirror_behind",
        SUBJECT,
        level_above(mirror.waiting, bad=MIRROR_STEPS_BEHIND, good=1),
        f"{mirror.waiting} steps wait to be mirrored: the link to the bucket is too slow for "
        "checkpoint.interval, or down.",
        raised_after_seconds=60.0,
    )
    silent, patience = now - mirror.heartbeat, MIRROR_PATIENCE_SECONDS
    yield Reading(
        "mirror_silent",
        SUBJECT,
        "good" if mirror.drained else level_above(silent, bad=patience, good=patience / 2),
        f"the mirror last said something {duration(max(0.0, silent))} ago; see logs/mirror.log.",
    )


def _budget(run: RunSight, money: Money) -> Iterator[Reading]:
    """At 100 % the run itself saves and stops."""
    if run.cost_usd is None or money.budget_usd is None:
        return
    share = run.cost_usd / money.budget_usd
    text = f"the run has cost ${run.cost_usd:,.2f}, {share:.0%} of ${money.budget_usd:,.2f}."
    marks: list[tuple[str, float, Severity]] = [
        ("budget_80", 0.80, "warning"),
        ("budget_95", 0.95, "critical"),
    ]
    for name, mark, severity in marks:
        yield Reading(name, SUBJECT, "bad" if share >= mark else "good", text, severity)


def _credit(run: RunSight, money: Money) -> Iterator[Reading]:
    """A machine whose account is empty is taken away."""
    if run.cost_usd is None or money.credit_usd is None or not money.per_hour_usd:
        return
    left = money.credit_usd - run.cost_usd
    hours = left / money.per_hour_usd
    unfinished = run.step is None or run.step != run.total_steps
    if run.cost_left_usd is not None:
        short = run.cost_left_usd / left if left > 0 else float("inf")
        yield Reading(
            "credit_short",
            SUBJECT,
            level_above(short, bad=1.0, good=0.95) if unfinished else "good",
            f"the credit lasts for {max(0.0, hours):.1f} h (${left:,.2f}), the rest of the run "
            f"takes {run.cost_left_usd / money.per_hour_usd:.1f} h (${run.cost_left_usd:,.2f}).",
        )
    yield Reading(
        "credit_ending",
        SUBJECT,
        level_below(hours, bad=CREDIT_HOURS, good=1.25 * CREDIT_HOURS) if unfinished else "good",
        f"the credit lasts for {max(0.0, hours):.1f} h more: then the machine is taken away.",
        "critical",
    )
