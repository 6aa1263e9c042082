"""Stops training at a gradient that is not finite, without waiting for each step's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from refocused.data.loader.batch import Batch
from refocused.engine.finite_updates import Verdict
from refocused.system.errors import TrainingError
from refocused.system.world import World


@dataclasses.dataclass(frozen=True, slots=True)
class StepTaken:
    """A step whose update was asked for.

    Attributes:
        step: Its number, from 1.
        losses: This rank's mean loss of each micro-batch `[accumulation]`, on the device.
        verdict: Whether the update was made.
        micro_batches: What the losses are of.
    """

    step: int
    losses: Tensor
    verdict: Verdict
    micro_batches: Sequence[Batch]


class FiniteSteps:
    """Looks at each step's verdict while the device computes the next one.

    Reading it at once would leave the GPU idle until the host has queued more work. The update of
    a step that is not finite is refused on the device, and so are all after it; before anything
    tells of a step or saves it, `settle` waits for its verdict.
    """

    def __init__(self, world: World, *, overflows: bool) -> None:
        """Begin a session.

        Args:
            world: The ranks, which agree on each verdict without talking.
            overflows: Whether a finite loss with an infinite gradient is daily bread (fp16).
        """
        self._world = world
        self._overflows = overflows
        self._unknown: StepTaken | None = None

    def add(self, taken: StepTaken) -> None:
        """Look at the step before this one.

        Raises:
            TrainingError: On every rank: that one was not finite.
        """
        self.settle()
        self._unknown = taken

    def settle(self) -> None:
        """Look at the last step.

        Raises:
            TrainingError: On every rank: it was not finite.
        """
        taken, self._unknown = self._unknown, None
        if taken is not None and not taken.verdict.was_made():
            self._explain(taken)

    def _explain(self, taken: StepTaken) -> None:
        """Stop, naming the ranks whose losses are to blame; or go on after an overflow."""
        finite = torch.isfinite(taken.losses).tolist()
        losses_are_finite = not any(self._world.largest([not all(finite)]))
        if losses_are_finite and self._overflows:
            return
        guilty = all(finite) if losses_are_finite else not all(finite)
        what = "Gradient" if losses_are_finite else "Loss"
        named = [
            batch.describe()
            for batch, is_finite in zip(taken.micro_batches, finite, strict=True)
            if losses_are_finite or not is_finite
        ]
        error = TrainingError(
            f"{what} is not finite on rank {self._world.rank} at step {taken.step:,} "
            f"({'; '.join(named)}). Stopped before the optimizer step. The last checkpoint is "
            "good: resume with a lower optimizer.lr, or leave the named file out with "
            "data.skip."
        )
        self._world.raise_together(error if guilty else None)
