"""The learning rate as a pure function of the step."""

import math
from pathlib import Path

from refocused.config.optimization import ScheduleConfig
from refocused.config.yaml_source import parse_yaml_mapping
from refocused.system.strict_json import MalformedError


def learning_rate(step: int, *, peak: float, total_steps: int, schedule: ScheduleConfig) -> float:
    """Return the learning rate of the update that follows `step` updates."""
    return peak * _share_of_peak(step, total_steps, schedule)


def _share_of_peak(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    warmup, floor = schedule.warmup_steps, schedule.floor_fraction
    if step < warmup:
        risen = (step + 1) / warmup
        if schedule.kind == "one_cycle":
            return _half_cosine(1.0 - risen, floor=0.0)
        return risen
    after = step - warmup
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "warm_restarts":
        assert schedule.cycle_steps is not None  # checked with the run file
        return _half_cosine(
            _cycle_progress(after, schedule.cycle_steps, schedule.cycle_growth), floor=floor
        )
    span = max(1, total_steps - warmup)
    return _half_cosine(min(1.0, after / span), floor=floor)


def _half_cosine(progress: float, *, floor: float) -> float:
    """Fall from 1 at progress 0 to the floor at progress 1 (Loshchilov & Hutter 2017, eq. 5)."""
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _cycle_progress(after: int, first_cycle: int, growth: float) -> float:
    """Return the progress (0 to 1) of the current cycle; each is `growth` times the last."""
    length = float(first_cycle)
    position = float(after)
    while position >= length:
        position -= length
        length *= growth
    return position / length


TOLERANCE = 0.01  # of the peak rate; smaller changes are not reported


def planned_steps(run_yaml: Path) -> int | None:
    """Return `run.steps` of a checkpoint's run file, if it is known."""
    try:
        steps = parse_yaml_mapping(run_yaml.read_bytes())["run"]["steps"]
    except (OSError, MalformedError, LookupError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def rate_change(
    step: int, *, planned: int | None, total_steps: int, peak: float, schedule: ScheduleConfig
) -> str | None:
    """Return a warning if a new number of steps makes the learning rate jump at a resume.

    Args:
        step: Where the run is resumed.
        planned: `run.steps` at the save; None if unknown.
        total_steps: `run.steps` now.
        peak: `optimizer.lr`.
        schedule: The present schedule.
    """
    if planned is None or planned == total_steps or step == 0:
        return None
    last = learning_rate(step - 1, peak=peak, total_steps=planned, schedule=schedule)
    following = learning_rate(step, peak=peak, total_steps=total_steps, schedule=schedule)
    smooth = learning_rate(step, peak=peak, total_steps=planned, schedule=schedule)
    if abs(following - smooth) <= TOLERANCE * peak:
        return None
    remedy = (
        f" To avoid the increase, set optimizer.lr={last:.1e} schedule.kind=constant."
        if following > last
        else ""
    )
    return (
        f"The schedule ({schedule.kind}) was planned for {planned:,} steps and now has "
        f"{total_steps:,}: the learning rate jumps from {last:.2e} to {following:.2e}." + remedy
    )
