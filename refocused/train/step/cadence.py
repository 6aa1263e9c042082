"""How often things happen, as a pure function of the step."""

from __future__ import annotations

import dataclasses
import math

from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.estimate.run_cost import times_left
from refocused.metrics.throughput import Activity


@dataclasses.dataclass(frozen=True, slots=True)
class Cadence:
    """Intervals in optimizer steps; 0 is never.

    Attributes:
        log: Between log lines.
        validation: Between validations.
        checkpoint: Between saves.
        keep_epochs: The end of an epoch is followed by a save too.
        save_best: A validation that is the best so far is followed by a save too.
        tasks: Between tasks.
        sample: Between samples.
        histograms: Between histograms of weights and gradients.
    """

    log: int
    validation: int
    checkpoint: int
    keep_epochs: bool = False
    save_best: bool = False
    tasks: int = 0
    sample: int = 0
    histograms: int = 0

    def log_due(self, step: int) -> bool:
        """Whether this step ends with a log line."""
        return _due(step, self.log)

    def validation_due(self, step: int) -> bool:
        """Whether this step is followed by a validation."""
        return _due(step, self.validation)

    def tasks_due(self, step: int) -> bool:
        """Whether this step is followed by tasks."""
        return _due(step, self.tasks)

    def sample_due(self, step: int) -> bool:
        """Whether this step is followed by a sample."""
        return _due(step, self.sample)

    def histograms_due(self, step: int) -> bool:
        """Whether weights and gradient of this step are described before its update."""
        return _due(step, self.histograms)

    def evaluation_due(self, step: int) -> bool:
        """Whether this step is followed by any of the three."""
        return self.validation_due(step) or self.tasks_due(step) or self.sample_due(step)

    def checkpoint_due(self, step: int) -> bool:
        """Whether this step is followed by a save."""
        return _due(step, self.checkpoint)

    def reasons_to_save(
        self, step: int, *, last: bool, epoch_ended: bool, is_best: bool, stopping: bool
    ) -> tuple[SaveReason, ...]:
        """Return the labels of the save that follows a step; none: there is no save.

        Args:
            step: Optimizer steps made.
            last: It is the run's last one.
            epoch_ended: A pass over the data was completed in it.
            is_best: Its validation is the best so far.
            stopping: Training ends after it, whatever else is due.
        """
        due = {
            SaveReason.ROLLING: self.checkpoint_due(step),
            SaveReason.EPOCH: self.keep_epochs and epoch_ended,
            SaveReason.FINAL: last,
            SaveReason.BEST: self.save_best and is_best,
        }
        tiers = tuple(tier for tier, is_due in due.items() if is_due)
        return tiers or ((SaveReason.EMERGENCY,) if stopping else ())

    def ahead(self, step: int, total_steps: int) -> dict[Activity, int]:
        """Count what is still to be done when a step is logged, the ending included.

        What is due after this step comes after its log line; the last step has one of each, whose
        sample is part of the ending. A validation that is followed by a save for being the best so
        far is counted as the rule: losses fall.
        """
        before = step - 1
        validations = times_left(before, total_steps, self.validation)
        saves = times_left(before, total_steps, self.checkpoint)
        if self.save_best and self.validation:
            both = math.lcm(self.checkpoint, self.validation)
            saves += validations - times_left(before, total_steps, both)
        return {
            "step": total_steps - step,
            "validation": validations,
            "tasks": times_left(before, total_steps, self.tasks),
            "sample": times_left(before, total_steps, self.sample),
            "save": saves,
            "ending": 1,
        }


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
