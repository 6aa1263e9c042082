"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from refocused.config.optimization import ScheduleConfig


def learning_rate(step: int, *, peak: float, total_steps: int, schedule: ScheduleConfig) -> float:
    """Return the learning rate of an update.

    Args:
        step: Updates made before this one, from 0.
        peak: Highest learning rate.
        total_steps: Updates of the whole run.
        schedule: Kind, warmup and floor.
    """
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
    """Return how far (0 to 1) the current cycle has come, each longer than the last by `growth`."""
    length = float(first_cycle)
    position = float(after)
    while position >= length:
        position -= length
        length *= growth
    return position / length
