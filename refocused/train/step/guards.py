"""What a step is guarded against: no batch, a gradient that is not finite, no memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from refocused.config.batch_plan import BatchPlan
from refocused.data.loader.batch import Batch
from refocused.engine.finite_updates import Verdict
from refocused.system.errors import RefocusedError, TrainingError
from refocused.system.world import World
from refocused.train.step.stopping import StopRequest


@contextlib.contextmanager
def explaining_lack_of_memory(
    plan: BatchPlan, *, world: World, step: int | None = None
) -> Iterator[None]:
    """Turn torch's error into ours, on the rank that it meets.

    Args:
        plan: The batch of a step.
        world: The ranks.
        step: The step that is made; None: the engine is built, or a loss is measured.

    Raises:
        TrainingError: The GPU's memory was not enough.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        used, total = 0.0, 0.0
        if world.device_kind == "cuda":
            free, whole = torch.cuda.mem_get_info(world.device)
            used, total = (whole - free) / 2**30, whole / 2**30
        raise TrainingError(
            lack_of_memory(plan, rank=world.rank, step=step, used_gib=used, total_gib=total)
        ) from error


def lack_of_memory(
    plan: BatchPlan, *, rank: int, step: int | None, used_gib: float, total_gib: float
) -> str:
    """Say what was not enough, and which settings take less."""
    smaller = next((d for d in range(plan.micro // 2, 0, -1) if plan.micro % d == 0), None)
    checkpointing = "model.activation_checkpointing=true"
    tries = checkpointing
    if smaller is not None:
        accumulation = plan.accumulation * plan.micro // smaller
        tries = (
            f"batch.micro={smaller} (same tokens a step, {accumulation} accumulation steps: with "
            f"batch.accumulation in the run file set that too) or {checkpointing}"
        )
    when = "outside of a step" if step is None else f"at step {step:,}"
    return (
        f"Out of GPU memory on rank {rank} {when} ({used_gib:.1f} of {total_gib:.1f} GiB). Micro "
        f"batch {plan.micro} x {plan.sequence_length} tokens. Try {tries}; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment loses less between "
        "blocks of memory."
    )


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


# How long a rank waits for its batches before all look whether to stop. The others are inside the
# agreement meanwhile, where a signal does not reach Python.
PATIENCE_SECONDS = 0.2


def fetch_together(
    world: World, fetch: Callable[[float], list[Batch] | None], stop: StopRequest
) -> list[Batch] | None:
    """Return this rank's next batches when every rank has its own.

    Args:
        world: The ranks.
        fetch: Waits so many seconds for this rank's batches; None when they are not there by then.
        stop: Looked at while a rank waits.

    Returns:
        None, on every rank alike, when they agree to stop instead of waiting on.

    Raises:
        RefocusedError: On every rank alike when one cannot have its batches; a rank that failed
            alone would leave the others inside a collective.
    """
    batches: list[Batch] | None = None
    while True:
        error: RefocusedError | None = None
        if batches is None:
            try:
                batches = fetch(PATIENCE_SECONDS)
            except RefocusedError as raised:
                error = raised
        failed, waits = world.largest([error is not None, batches is None])
        if failed:
            world.raise_together(error)
        if not waits:
            return batches
        if stop.agreed():
            return None
