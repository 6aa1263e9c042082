"""When a run logs, evaluates and saves: one policy for training, estimates and the doctor."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    from refocused.config.batch_plan import BatchPlan
    from refocused.config.run_config import RunConfig

Interval = Literal["log", "validation", "checkpoint", "tasks", "sample", "histograms"]
Activity = Literal["start_up", "step", "validation", "tasks", "sample", "save", "ending"]


@dataclasses.dataclass(frozen=True, slots=True)
class Cadence:
    """Intervals in optimizer steps; 0 is never, but after the last step."""

    log: int
    validation: int
    checkpoint: int
    keep_epochs: bool = False  # save at the end of an epoch too
    save_best: bool = False  # save after the best validation so far too
    tasks: int = 0
    sample: int = 0
    histograms: int = 0  # between histograms of weights and gradients

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the intervals of a run; what the run does not have is never due."""
        evaluation, checkpoint = config.evaluation, config.checkpoint
        return cls(
            log=config.log.interval,
            validation=evaluation.interval,
            checkpoint=checkpoint.interval,
            keep_epochs=checkpoint.keep_epochs,
            save_best=checkpoint.save_best,
            tasks=evaluation.task_interval if evaluation.tasks else 0,
            sample=evaluation.sample_interval if evaluation.sample_prompt else 0,
            histograms=config.tracking.histogram_interval,
        )

    def due(self, what: Interval, step: int) -> bool:
        """Whether this is due at the end of a step."""
        interval: int = getattr(self, what)
        return interval > 0 and step % interval == 0

    def evaluation_due(self, step: int) -> bool:
        """Whether a validation, tasks or a sample follow a step."""
        return self.due("validation", step) or self.due("tasks", step) or self.due("sample", step)

    def left(self, step: int, total_steps: int) -> dict[Activity, float]:
        """Count what is due after a step, with what follows the run's last one.

        Every validation is assumed to be the best so far and to be followed by a save, because
        losses fall.
        """

        def left(interval: int) -> int:
            return times_left(step, total_steps, interval)

        validations, saves = left(self.validation), left(self.checkpoint)
        if self.save_best and self.validation:
            saves += validations - left(math.lcm(self.checkpoint, self.validation))
        return {
            "validation": validations,
            "tasks": left(self.tasks),
            "sample": left(self.sample),
            "save": saves,
        }

    def ahead(self, step: int, total_steps: int, plan: BatchPlan) -> dict[Activity, float]:
        """Count what is still to be done when a step is logged, including the ending.

        A step of the batch's warm-up counts as its share of a whole one. What is due after this
        step comes after its log line; the last step has one of each, whose sample is part of the
        ending.
        """
        steps = plan.sequences_between(step, total_steps) / plan.global_batch_size
        return {"step": steps, **self.left(step - 1, total_steps), "ending": 1}


def times_left(step: int, total_steps: int, interval: int) -> int:
    """Count how often something with an interval is due after a step, including the last step.

    With an interval of 0 it is due only after the last step.
    """
    if step >= total_steps:
        return 0
    between = (total_steps - 1) // interval - step // interval if interval else 0
    return max(0, between) + 1
