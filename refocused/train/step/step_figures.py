"""The figures that a run's reports are made of."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from refocused.checkpoints.step.checkpoint_directory import FIRST_BRANCH, Branch
from refocused.metrics.history import StepMetrics
from refocused.system.errors import counted

if TYPE_CHECKING:
    from refocused.config.batch_plan import BatchPlan
    from refocused.config.cadence import Cadence
    from refocused.data.order.sequences import Position
    from refocused.engine.schedule import RatePlan
    from refocused.evaluate.multiple_choice import TaskResult
    from refocused.metrics.rank_times import RankTimes, Row
    from refocused.metrics.throughput import Throughput
    from refocused.system.world import World
    from refocused.train.step.state import TrainState


class Totals(NamedTuple):
    """A session's totals at a log line."""

    steps: int = 0
    step_seconds: float = 0.0
    waited_seconds: float = 0.0
    session_seconds: float = 0.0

    @classmethod
    def of(cls, meter: Throughput, waited_seconds: float = 0.0) -> Totals:
        """Return the present totals."""
        return cls(meter.steps, meter.laps["step"], waited_seconds, meter.session_seconds)


@dataclasses.dataclass(frozen=True, slots=True)
class RunFigures:
    """What does not change during a run."""

    name: str
    total_steps: int
    plan: BatchPlan
    rates: RatePlan
    cadence: Cadence
    mfu: Callable[[float], float | None]  # of tokens a second; None if the GPU is unknown
    per_hour_usd: float | None  # price of the machine; None: unknown
    branch: Branch = FIRST_BRANCH
    possible_mfu: float = 1.0  # a larger MFU is not reported
    epoch_sequences: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of each source
    place: Callable[[Position], int | None] = lambda position: None  # in sequences of the stream

    def source_progress(self, state: TrainState) -> dict[str, object]:
        """Return the tokens and epochs that were trained on of each source of a mixture."""
        length, consumed = self.plan.sequence_length, state.position.sources or {}
        return sources_record(
            {
                name: {"tokens": consumed[name] * length, "epoch": consumed[name] / epoch}
                for name, epoch in self.epoch_sequences.items()
                if name in consumed
            }
        )


def gather_figures(
    world: World, losses: Sequence[float], rows: Sequence[Row], times: RankTimes
) -> tuple[StepMetrics, Mapping[str, list[float]]]:
    """Combine the figures of all ranks, which must all call; the only exchange of a log line.

    `losses` are this rank's of the last step and of all, `rows` the phases of its measured steps.

    Returns:
        The means over the ranks, the fullest GPU and the slowest rank; and the mean time of each
        phase of a step by rank.
    """
    place, peak = (socket.gethostname(), world.local_rank), 0.0  # share of the GPU's memory
    if world.device_kind == "cuda":
        total = torch.cuda.get_device_properties(world.device).total_memory
        peak = torch.cuda.max_memory_allocated(world.device) / total
    gathered = world.gather((losses, peak, rows, place))
    all_losses, memory, all_rows, places = zip(*gathered, strict=True)
    loss, loss_mean = (sum(column) / world.world_size for column in zip(*all_losses, strict=True))
    slowest, seconds = times.add(all_rows, places)
    fullest = max(memory) or None
    return StepMetrics(
        0, loss=loss, loss_mean=loss_mean, gpu_memory_fraction=fullest, slowest=slowest
    ), seconds


def sources_record(values: Mapping[str, object]) -> dict[str, object]:
    """Return a mixture's figures by source as the part of a record; nothing without a mixture."""
    return {"sources": dict(values)} if values else {}  # of a mixture: these figures by source


def scores_text(result: TaskResult) -> str:
    """Return the scores on a task for a log line."""
    text = result.task
    for name, measure in result.measures.items():
        error = measure.standard_error
        text += f" {name} {measure.value:.4f}" + ("" if error is None else f" +- {error:.4f}")
    skipped = f", {result.skipped:,} skipped" if result.skipped else ""
    return f"{text} ({counted(result.items, 'item')}{skipped})"
