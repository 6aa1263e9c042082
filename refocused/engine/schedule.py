"""The learning rate as a pure function of the step."""

import dataclasses
import math
from pathlib import Path

import pydantic

from refocused.config.optimization import (
    ROLES,
    OptimizerConfig,
    Role,
    ScheduleConfig,
    cycle_at,
    decayed_share,
    half_cosine,
    share_of_peak,
)
from refocused.config.yaml_source import parse_yaml_mapping
from refocused.system.strict_json import MalformedError

TOLERANCE = 0.01  # of the peak rate; smaller changes are not reported
FIRST_MOMENTUM = 0.85  # of a warmup of Muon's momentum
_OF_ROLES: dict[Role, str] = {
    "matrix": "Muon's matrices",
    "embedding": "the embeddings",
    "head": "the head",
    "scalar": "vectors",
}


@dataclasses.dataclass(frozen=True, slots=True)
class RatePlan:
    """What determines the learning rates of a run, Muon's momentum and the weight decay.

    Each is of the update that follows `step` updates.
    """

    optimizer: OptimizerConfig
    total_steps: int
    schedule: ScheduleConfig

    def at(self, step: int, role: Role | None = None) -> float:
        """Return the learning rate of a role, or of all parameters without a rate of their own."""
        share = share_of_peak(step, self.total_steps, self.schedule)
        return self.optimizer.peak(role) * share

    def momentum_at(self, step: int) -> float:
        """Return Muon's momentum: it rises linearly, and falls linearly while the rate decays."""
        full, warmup = self.optimizer.momentum, self.optimizer.momentum_warmup_steps
        risen = min(1.0, step / warmup) if warmup else 1.0
        momentum = (1 - risen) * FIRST_MOMENTUM + risen * full
        if (end := self.optimizer.momentum_end) is None:
            return momentum
        fallen = decayed_share(step, self.total_steps, self.schedule)
        return min(momentum, (1 - fallen) * full + fallen * end)

    def decay_share_at(self, step: int) -> float:
        """Return the factor of every weight decay."""
        kind, done = self.optimizer.decay_schedule, step / self.total_steps
        if kind == "constant":
            return 1.0
        return 1.0 - done if kind == "linear" else half_cosine(done, floor=0.0)


def unfinished_cycle(total_steps: int, schedule: ScheduleConfig) -> str | None:
    """Describe the last update of `warm_restarts` if the run ends before a cycle does."""
    if schedule.kind != "warm_restarts":
        return None
    last = total_steps - 1
    position, length = cycle_at(last, schedule)
    left = math.ceil(length - position) - 1  # updates
    if left <= 0:
        return None
    return (
        f"the last update is at {share_of_peak(last, total_steps, schedule):.0%} of the peak "
        f"rate: its cycle of schedule.kind=warm_restarts ends at step {total_steps + left:,}. Set "
        "run.steps to the end of a cycle"
    )


_PLAN = pydantic.TypeAdapter(RatePlan)


def saved_plan(run_yaml: Path, total_steps: int | None = None) -> RatePlan | None:
    """Return the plan of a checkpoint's run file; None if it cannot be read.

    Its manifest has the `total_steps` of a run whose length is given in tokens.
    """
    try:
        saved = parse_yaml_mapping(run_yaml.read_bytes())
        plan = {
            "optimizer": saved["optimizer"],
            "total_steps": saved["run"]["steps"] or total_steps,
        }
        return _PLAN.validate_python({**plan, "schedule": saved.get("schedule")})
    except (OSError, MalformedError, LookupError, TypeError, pydantic.ValidationError):
        return None


def rate_change(step: int, *, saved: RatePlan | None, now: RatePlan) -> str | None:
    """Describe the learning rate from a resume on, if other settings make it jump there.

    If it does not, the same for that of the first role that does. Without a `saved` plan nothing is
    known.
    """
    if saved is None or not 0 < step < now.total_steps:
        return None
    for role in (None, *ROLES):
        last, following = saved.at(step - 1, role), now.at(step, role)
        # No jump where the rate stays, goes on as planned, or begins a decay from the same rate.
        same = last, saved.at(step, role), following + last - now.at(step - 1, role)
        jump = min(abs(following - rate) for rate in same)
        if jump > TOLERANCE * max(saved.optimizer.peak(role), now.optimizer.peak(role)):
            break
    else:
        return None
    rate = f"learning rate of {_OF_ROLES[role]}" if role else "learning rate"
    course = [now.at(one, role) for one in range(step, now.total_steps)]
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
    for other in ROLES:
        if any(plan.optimizer.peak(other) != plan.optimizer.lr for plan in (saved, now)):
            kept += f" optimizer.{other}_lr={saved.at(step - 1, other):.1e}"
    return (
        f"{text}To avoid the increase, set {kept} schedule.kind=constant. A run of open length "
        "needs schedule.kind=wsd: --resume STEP --as NAME run.steps=N decays from any of its "
        "stable checkpoints."
    )
