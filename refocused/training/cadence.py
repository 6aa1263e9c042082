"""How often things happen, as a pure function of the step."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Cadence:
    """Intervals in optimizer steps; 0 is never.

    Attributes:
        log: Between log lines.
        validation: Between validations.
        checkpoint: Between saves.
    """

    log: int
    validation: int
    checkpoint: int

    def log_due(self, step: int) -> bool:
        """Whether this step ends with a log line."""
        return _due(step, self.log)

    def validation_due(self, step: int) -> bool:
        """Whether this step is followed by a validation."""
        return _due(step, self.validation)

    def checkpoint_due(self, step: int) -> bool:
        """Whether this step is followed by a save."""
        return _due(step, self.checkpoint)

    def validations_left(self, step: int, total_steps: int) -> int:
        """Count the validations after a step; the last step always has one."""
        return _left(step, total_steps, self.validation)

    def saves_left(self, step: int, total_steps: int) -> int:
        """Count the saves after a step; the last step always has one."""
        return _left(step, total_steps, self.checkpoint)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _left(step: int, total_steps: int, interval: int) -> int:
    if step >= total_steps:
        return 0
    between = (total_steps - 1) // interval - step // interval if interval else 0
    return max(0, between) + 1
