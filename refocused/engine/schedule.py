"""The learning rate as a pure function of the step."""

import dataclasses
import math
from pathlib import Path
from typing import Self

import pydantic

from refocused.config.optimization import ScheduleConfig
from refocused.config.yaml_source import parse_yaml_mapping
from refocused.system.strict_json import MalformedError


def _share_of_peak(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    warmup, floor = schedule.warmup_steps, schedule.min_lr_ratio
    if step < warmup:
        risen = (step + 1) / warmup
        if schedule.kind == "one_cycle":
            return _half_cosine(1.0 - risen, floor=0.0)
        return risen
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "warm_restarts":
        position, length = _cycle(step, schedule)
        return _half_cosine(position / length, floor=floor)
    # From the last update at the peak to the run's last update, which is at the floor.
    begin, last = max(0, schedule.decay_begins(total_steps) - 1), total_steps - 1
    progress = min(1.0, max(0, step - begin) / max(1, last - begin))
    if schedule.kind == "linear" or schedule.decay == "linear":
        return 1.0 - (1.0 - floor) * progress
    if schedule.kind == "wsd":  # Haegele et al. 2024, eq. 2
        return 1.0 - (1.0 - floor) * math.sqrt(progress)
    return _half_cosine(progress, floor=floor)


def _cycle(step: int, schedule: ScheduleConfig) -> tuple[float, float]:
    """Return how far a step is in its cycle of `warm_restarts`, and the cycle's length."""
    assert schedule.cycle_steps is not None  # checked with the run file
    position, length = float(step - schedule.warmup_steps), float(schedule.cycle_steps)
    while position >= length:  # a cycle is `cycle_growth` times as long as the one before
        position -= length
        length *= schedule.cycle_growth
    return position, length


def _half_cosine(progress: float, *, floor: float) -> float:
    """Fall from 1 at progress 0 to the floor at progress 1 (Loshchilov & Hutter 2017, eq. 5)."""
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


TOLERANCE = 0.01  # of the peak rate; smaller changes are not reported


@dataclasses.dataclass(frozen=True, slots=True)
class RatePlan:
    """What determines the learning rate of a run."""

    peak: float  # `optimizer.lr`
    total_steps: int
    schedule: ScheduleConfig
    matrix_peak: float | None = None  # `optimizer.matrix_lr`

    def of_matrices(self) -> Self:
        """Return the plan of Muon's matrices."""
        return dataclasses.replace(self, peak=self.matrix_peak or self.peak)

    def at(self, step: int) -> float:
        """Return the learning rate of the update that follows `step` updates."""
        return self.peak * _share_of_peak(step, self.total_steps, self.schedule)


def unfinished_cycle(total_steps: int, schedule: ScheduleConfig) -> str | None:
    """Describe the last update of `warm_restarts` if the run ends before a cycle does."""
    if schedule.kind != "warm_restarts":
        return None
    last = total_steps - 1
    position, length = _cycle(last, schedule)
    left = math.ceil(length - position) - 1  # updates
    if left <= 0:
        return None
    return (
        f"the last update is at {_share_of_peak(last, total_steps, schedule):.0%} of the peak "
        f"rate: its cycle of schedule.kind=warm_restarts ends at step {total_steps + left:,}. Set "
        "run.steps to the end of a cycle"
    )


_PLAN = pydantic.TypeAdapter(RatePlan)


def saved_plan(run_yaml: Path) -> RatePlan | None:
    """Return the plan of a checkpoint's run file; None if it cannot be read."""
    try:
        saved = parse_yaml_mapping(run_yaml.read_bytes())
        rates, steps = saved["optimizer"], saved["run"]["steps"]
        plan = {"peak": rates["lr"], "total_steps": steps, "schedule": saved.get("schedule")}
        return _PLAN.validate_python({**plan, "matrix_peak": rates.get("matrix_lr")})
    except (OSError, MalformedError, LookupError, TypeError, pydantic.ValidationError):
        return None


def rate_change(step: int, *, saved: RatePlan | None, now: RatePlan) -> str | None:
    """Describe the learning rate from a resume on, if other settings make it jump there.

    If it does not, the same for that of Muon's matrices. Without a `saved` plan nothing is known.
    """
    if saved is None or not 0 < step < now.total_steps:
        return None
    matrices = saved.of_matrices(), now.of_matrices()
    plans = (("learning rate", saved, now), ("learning rate of Muon's matrices", *matrices))
    for rate, before, after in plans:  # noqa: B007 - `rate` is read after the loop
        last, following = before.at(step - 1), after.at(step)
        # No jump where the rate stays, goes on as planned, or begins a decay from the same rate.
        jump = min(
            abs(one)
            for one in (following - last, following - before.at(step), after.at(step - 1) - last)
        )
        if jump > TOLERANCE * max(before.peak, after.peak):
            break
    else:
        return None
    course = [after.at(one) for one in range(step, now.total_steps)]
    highest = course.index(max(course))
    peak = f", reaches {course[highest]:.2e} at step {step + 1 + highest:,}" if highest else ""
    text = (
        f"The schedule ({saved.schedule.kind}) was planned for {saved.total_steps:,} steps; now it "
        f"is {now.schedule.kind} over {now.total_steps:,}. The {rate} jumps from {last:.2e} to "
        f"{following:.2e} at step {step + 1:,}{peak} and ends at {course[-1]:.2e}. "
    )
    falls = following < last
    wsd = now if falls else saved
    if wsd.schedule.kind == "wsd":
        begin = wsd.schedule.decay_begins(wsd.total_steps)
        return f"{text}To avoid this, resume from step {begin:,} or before it, at the peak."
    if falls:
        return text + "To avoid this, set back what differs."
    kept = f"optimizer.lr={saved.at(step - 1):.1e}"
    if matrices[0].peak != saved.peak or matrices[1].peak != now.peak:
        kept += f" optimizer.matrix_lr={matrices[0].at(step - 1):.1e}"
    return (
        f"{text}To avoid the increase, set {kept} schedule.kind=constant. A run of open length "
        "needs schedule.kind=wsd: --resume STEP --as NAME run.steps=N decays from any of its "
        "stable checkpoints."
    )
