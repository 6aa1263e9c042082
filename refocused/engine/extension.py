"""What another number of steps does to the learning rate of a run that is resumed."""

from __future__ import annotations

from pathlib import Path

from refocused.config.optimization import ScheduleConfig
from refocused.config.strict_yaml import parse_yaml_mapping
from refocused.engine.schedule import learning_rate
from refocused.system.strict_json import MalformedError

TOLERANCE = 0.01  # a share of the rate; less is nothing to mention


def planned_steps(run_yaml: Path) -> int | None:
    """Return `run.steps` of the run file that a checkpoint keeps; None when it does not say."""
    try:
        steps = parse_yaml_mapping(run_yaml.read_bytes())["run"]["steps"]
    except (OSError, MalformedError, LookupError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def rate_change(
    step: int, *, planned: int | None, total_steps: int, peak: float, schedule: ScheduleConfig
) -> str | None:
    """Say how the learning rate moves at once because the schedule is stretched or cut.

    The schedule stays a pure function of the step and of all steps, so a resume under the new
    number is bit for bit again; but a cosine that had come down goes up.

    Args:
        step: Where the run is resumed.
        planned: `run.steps` when it was saved; None: unknown.
        total_steps: `run.steps` now.
        peak: `optimizer.lr`.
        schedule: As it is now.

    Returns:
        A line for a person; None when there is nothing to say.
    """
    if planned is None or planned == total_steps or step == 0:
        return None
    last = learning_rate(step - 1, peak=peak, total_steps=planned, schedule=schedule)
    following = learning_rate(step, peak=peak, total_steps=total_steps, schedule=schedule)
    smooth = learning_rate(step, peak=peak, total_steps=planned, schedule=schedule)
    if abs(following - smooth) <= TOLERANCE * peak:
        return None
    way_out = (
        f" To stay near where it was, give optimizer.lr={last:.1e} schedule.kind=constant."
        if following > last
        else ""
    )
    return (
        f"The schedule ({schedule.kind}) was laid out for {planned:,} steps and is now for "
        f"{total_steps:,}: the learning rate goes from {last:.2e} to {following:.2e} at once."
        + way_out
    )
