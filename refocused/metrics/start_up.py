"""Time the start of a session by phase: from a crash, or a command, to the first new step."""

from __future__ import annotations

import time

PHASES = (
    *("exit", "launch", "imports", "join", "plan", "checkpoint", "data", "model", "engine", "load"),
    *("ready", "first_batch", "first_step"),
)


class StartUp(dict[str, float | None]):
    """Seconds of each phase of rank 0's start, in order; None: it did not take place.

    * exit: a crashed launch ended, and the pause of --restarts passed
    * launch: the supervisor's command and DeepSpeed's launcher started
    * imports: the interpreter started, and loaded torch and the rest
    * join: ranks found each other, and the run's settings were checked
    * plan: `auto` settings were decided, the folder was claimed
    * checkpoint: a checkpoint was found, fetched and verified
    * data: the data was opened, shards were fetched
    * model: the model was built, its blocks compiled
    * engine: the engine was built: the states were partitioned
    * load: the checkpoint was loaded, its loss checked
    * ready: tasks, mirror, sampler and trackers were started
    * first_batch: the first batches came
    * first_step: the first step was computed, kernels made for it
    """

    def as_record(self) -> dict[str, float]:
        """Return the phases that took place for JSON."""
        known = {phase: seconds for phase, seconds in self.items() if seconds is not None}
        return {f"{phase}_seconds": round(seconds, 3) for phase, seconds in known.items()}

    def as_line(self, step: int) -> str:
        """Return the whole time until a step, and every phase, as a log line."""
        since = "a crash" if self["exit"] is not None else "the start"
        phases = " | ".join(
            f"{name.removesuffix('_seconds').replace('_', ' ')} {value:.1f}"
            for name, value in self.as_record().items()
        )
        whole = f"{sum(self.as_record().values()):.1f} s"
        return f"  start-up {whole} from {since} to step {step:,}: {phases} s"


class StartUpClock:
    """Books the time since the last call on a phase; the first began at `began_seconds`."""

    def __init__(self, began_seconds: float) -> None:
        self.spent = StartUp(dict.fromkeys(PHASES))
        self.began_seconds = began_seconds
        self._last = began_seconds

    def end(self, phase: str, *, at_seconds: float | None = None) -> None:
        """End a phase, now or at a monotonic time; a phase may have several parts."""
        now = time.monotonic() if at_seconds is None else at_seconds
        self.spent[phase] = (self.spent[phase] or 0.0) + max(0.0, now - self._last)
        self._last = now
