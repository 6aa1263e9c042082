"""Time the start of a session by phase: from a crash, or a command, to the first new step."""

from __future__ import annotations

import dataclasses
import time


@dataclasses.dataclass(slots=True)
class StartUp:
    """Seconds of each phase of rank 0's start, in order; None: it did not take place."""

    exit_seconds: float | None = None  # a crashed launch ended, and the pause of --restarts passed
    launch_seconds: float | None = None  # the supervisor's command and DeepSpeed's launcher started
    imports_seconds: float | None = None  # the interpreter started, and loaded torch and the rest
    join_seconds: float | None = None  # ranks found each other, and the run's settings were checked
    plan_seconds: float | None = None  # `auto` settings were decided, the folder was claimed
    checkpoint_seconds: float | None = None  # a checkpoint was found, fetched and verified
    data_seconds: float | None = None  # the data was opened, shards were fetched
    model_seconds: float | None = None  # the model was built, its blocks compiled
    engine_seconds: float | None = None  # the engine was built: the states were partitioned
    load_seconds: float | None = None  # the checkpoint was loaded, its loss checked
    ready_seconds: float | None = None  # tasks, mirror, sampler and trackers were started
    first_batch_seconds: float | None = None  # the first batches came
    first_step_seconds: float | None = None  # the first step was computed, kernels made for it

    def as_record(self) -> dict[str, float]:
        """Return the phases that took place for JSON."""
        fields = dataclasses.asdict(self).items()
        return {name: round(value, 3) for name, value in fields if value is not None}

    def as_line(self, step: int) -> str:
        """Return the whole time until a step, and every phase, as a log line."""
        since = "a crash" if self.exit_seconds is not None else "the start"
        phases = " | ".join(
            f"{name.removesuffix('_seconds').replace('_', ' ')} {value:.1f}"
            for name, value in self.as_record().items()
        )
        whole = f"{sum(self.as_record().values()):.1f} s"
        return f"  start-up {whole} from {since} to step {step:,}: {phases} s"


class StartUpClock:
    """Books the time since the last call on a phase; the first began at `began_seconds`."""

    def __init__(self, began_seconds: float) -> None:
        self.spent = StartUp()
        self.began_seconds = began_seconds
        self._last = began_seconds

    def end(self, phase: str, *, at_seconds: float | None = None) -> None:
        """End a phase, now or at a monotonic time; a phase may have several parts."""
        now = time.monotonic() if at_seconds is None else at_seconds
        name, seconds = f"{phase}_seconds", max(0.0, now - self._last)
        setattr(self.spent, name, (getattr(self.spent, name) or 0.0) + seconds)
        self._last = now
