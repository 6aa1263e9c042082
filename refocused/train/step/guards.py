"""Guards of a step: missing batches, non-finite gradients, lack of memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from refocused.system.errors import RefocusedError, TrainingError
from refocused.system.number_text import size_text

if TYPE_CHECKING:
    from refocused.config.batch_plan import BatchPlan
    from refocused.data.loader.batch import Batch
    from refocused.data.order.sequences import Position
    from refocused.engine.finite_updates import UpdateOutcome
    from refocused.system.world import World
    from refocused.train.step.spikes import SpikeWatch
    from refocused.train.step.stopping import StopRequest


@contextlib.contextmanager
def explaining_lack_of_memory(
    plan: BatchPlan, *, world: World, step: int | None = None
) -> Iterator[None]:
    """Turn torch's out-of-memory error into a `TrainingError` that names smaller settings.

    `step` is the step being made; None while the engine is built or a loss is measured.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = 0, 0
        if world.device_kind == "cuda":
            free, total = torch.cuda.mem_get_info(world.device)
        used = f"{size_text(total - free)} of {size_text(total)}"
        tries = "model.activation_checkpointing=true"
        smaller = next(
            (d for d in range(plan.micro_batch_size // 2, 0, -1) if plan.micro_batch_size % d == 0),
            None,
        )
        if smaller is not None:
            accumulation = plan.gradient_accumulation_steps * plan.micro_batch_size // smaller
            tries = (
                f"batch.micro_batch_size={smaller} (same tokens a step, "
                f"{accumulation} accumulation steps: with "
                f"batch.gradient_accumulation_steps in the run file set that too) or {tries}"
            )
        when = "outside of a step" if step is None else f"at step {step:,}"
        raise TrainingError(
            f"Out of GPU memory on rank {world.rank} {when} ({used}). "
            f"Micro batch {plan.micro_batch_size} x {plan.sequence_length} tokens. Try {tries}."
        ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class StepTaken:
    """A step whose update is queued on the device."""

    step: int  # its number, from 1
    losses: Tensor  # this rank's mean loss of each micro-batch `[accumulation]`, on the device
    outcome: UpdateOutcome  # how the update ended
    micro_batches: Sequence[Batch]  # the batches of these losses
    before: Position  # in the stream, of the step's first sequence
    after: Position  # behind its last one


class FiniteSteps:
    """Checks each step's outcome while the device computes the next step.

    Reading it at once would leave the GPU idle until the host has queued more work. `settle` waits
    for the outcome before a step is reported or saved.
    """

    def __init__(self, world: World, spikes: SpikeWatch | None = None, *, overflows: bool) -> None:
        """Begin a session; `overflows`: infinite gradients of finite losses are normal (fp16)."""
        self._world = world
        self._overflows = overflows
        self._spikes = spikes
        self._unknown: StepTaken | None = None

    def add(self, taken: StepTaken) -> None:
        """Settle the step before this one, and keep this one for later."""
        self.settle()
        self._unknown = taken

    def settle(self) -> None:
        """Wait for the last outcome; raise on every rank if it was not finite, or as `spikes`."""
        taken, self._unknown = self._unknown, None
        if taken is None or taken.outcome.was_finite():
            if taken is not None and self._spikes is not None:
                self._spikes.settle(taken)
            return
        taken.outcome.explain(taken.step - 1)
        finite = torch.isfinite(taken.losses).tolist()
        losses_are_finite = not any(self._world.largest([not all(finite)]))
        if losses_are_finite and self._overflows:
            return
        named = [
            batch.describe()
            for batch, is_finite in zip(taken.micro_batches, finite, strict=True)
            if losses_are_finite or not is_finite
        ]
        error = TrainingError(
            f"{'Gradient' if losses_are_finite else 'Loss'} is not finite on rank "
            f"{self._world.rank} at step {taken.step:,} ({'; '.join(named)}). Stopped before the "
            "optimizer step. The last checkpoint is good: resume with a lower optimizer.lr, or "
            "leave the named file out with data.skip."
        )
        self._world.raise_together(error if losses_are_finite or not all(finite) else None)


# How long a rank waits for its batches before all ranks check for a stop. The others are inside a
# collective meanwhile, where Python does not see a signal.
FETCH_SECONDS = 0.2


def fetch_together(
    world: World, fetch: Callable[[float], list[Batch] | None], stop: StopRequest
) -> list[Batch] | None:
    """Fetch a step's batches on every rank; return None on all of them if a stop was requested.

    `fetch` waits at most so many seconds for this rank's batches, and returns None without them.

    Raises:
        RefocusedError: On every rank when one fails; a rank that failed alone would leave the
            others inside a collective.
    """
    batches: list[Batch] | None = None
    with world.progress.doing("data"):
        while True:
            error: RefocusedError | None = None
            if batches is None:
                try:
                    batches = fetch(FETCH_SECONDS)
                except RefocusedError as raised:
                    error = raised
            failed, waits = world.largest([error is not None, batches is None])
            if failed:
                world.raise_together(error)
            if not waits:
                return batches
            if stop.agreed():
                return None
