"""What rank 0 says of a step, from the state, the clock and the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from refocused.checkpoints.branches import FIRST_BRANCH, Branch
from refocused.config.batch_plan import BatchPlan
from refocused.config.optimization import OptimizerConfig, ScheduleConfig
from refocused.config.prices import cost_usd
from refocused.engine.engine import Engine
from refocused.engine.schedule import learning_rate
from refocused.estimate.work import CREDIBLE_MFU
from refocused.monitoring.metrics import StepMetrics
from refocused.monitoring.throughput import Throughput
from refocused.training.cadence import Cadence
from refocused.training.state import TrainState


@dataclasses.dataclass(frozen=True, slots=True)
class RunFigures:
    """What of a run does not change while it goes on.

    Attributes:
        name: The run's name.
        branch: The branch of the run that training goes on with.
        total_steps: Steps of the whole run.
        plan: The batch of a step.
        optimizer: For the learning rate.
        schedule: For the learning rate.
        cadence: For the time left.
        mfu: Turns tokens a second into MFU; None where the GPU is unknown.
        per_hour_usd: Price of the machine; None: unknown.
        credible_mfu: Above it an MFU is refused.
        epoch_windows: Windows of one epoch of each source of a mixture, by name.
    """

    name: str
    total_steps: int
    plan: BatchPlan
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    cadence: Cadence
    mfu: Callable[[float], float | None]
    per_hour_usd: float | None
    branch: Branch = FIRST_BRANCH
    credible_mfu: float = CREDIBLE_MFU
    epoch_windows: Mapping[str, int] = dataclasses.field(default_factory=dict)


class StepFigures:
    """Measures steps; a step's wait for batches counts from the step measured before it."""

    def __init__(self, figures: RunFigures, *, engine: Engine, throughput: Throughput) -> None:
        """Measure steps of this run from here on."""
        self._figures = figures
        self._engine = engine
        self._throughput = throughput
        self._waited = self._measured_at = 0.0

    def start(self) -> None:
        """Count the time from here on."""
        self._measured_at = self._throughput.session_seconds

    def of(
        self, state: TrainState, *, loss: float, waited_seconds: float, memory: float | None
    ) -> tuple[StepMetrics, float | None]:
        """Return a step's metrics, and the MFU that was refused where it cannot be.

        Args:
            state: After the step.
            loss: Mean over ranks, in nats a token.
            waited_seconds: For batches, since the session began.
            memory: Peak share of the GPU's memory; None without a GPU.
        """
        figures, seconds = self._figures, self._throughput.step_seconds
        speed = figures.plan.tokens / seconds if seconds else None
        left = self._throughput.seconds_left(
            steps=figures.total_steps - state.step,
            validations=figures.cadence.validations_left(state.step, figures.total_steps),
            saves=figures.cadence.saves_left(state.step, figures.total_steps),
            tasks=figures.cadence.tasks_left(state.step, figures.total_steps),
            samples=figures.cadence.samples_left(state.step, figures.total_steps),
        )
        mfu = figures.mfu(speed) if speed else None
        refused = mfu is not None and mfu > figures.credible_mfu
        metrics = StepMetrics(
            step=state.step,
            total_steps=figures.total_steps,
            tokens=state.tokens,
            epoch=state.position.epoch,
            loss=loss,
            learning_rate=learning_rate(
                state.step - 1,
                peak=figures.optimizer.lr,
                total_steps=figures.total_steps,
                schedule=figures.schedule,
            ),
            gradient_norm=self._engine.gradient_norm(),
            loss_scale=self._engine.loss_scale(),
            skipped_steps=self._engine.skipped_steps,
            step_seconds=seconds,
            tokens_per_second=speed,
            mfu_fraction=None if refused else mfu,
            mfu_refused=refused,
            data_wait_fraction=self._wait_fraction(waited_seconds),
            gpu_memory_fraction=memory,
            seconds_left=left,
            seconds_trained=state.seconds,
            cost_usd=state.cost_usd,
            cost_left_usd=cost_usd(left, figures.per_hour_usd),
        )
        return metrics, mfu if refused else None

    def _wait_fraction(self, waited_seconds: float) -> float:
        """Return the share of the time since the last line that batches were waited for."""
        now = self._throughput.session_seconds
        waited, passed = waited_seconds - self._waited, now - self._measured_at
        self._waited, self._measured_at = waited_seconds, now
        return min(1.0, waited / passed) if passed > 0 else 0.0
