"""What rank 0 reports of a step, and how often it logs, evaluates and saves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch
from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.config.batch_plan import BatchPlan
from refocused.config.optimization import OptimizerConfig, ScheduleConfig
from refocused.config.prices import cost_usd
from refocused.engine.engine import Engine
from refocused.engine.schedule import learning_rate
from refocused.estimate.flops import CREDIBLE_MFU
from refocused.estimate.run_cost import times_left
from refocused.metrics.step_metrics import StepMetrics
from refocused.metrics.throughput import Activity, Throughput
from refocused.train.step.state import TrainState


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


@dataclasses.dataclass(frozen=True, slots=True)
class _Measured:
    """What a session has taken up to a log line."""

    steps: int = 0
    step_seconds: float = 0.0
    waited_seconds: float = 0.0
    session_seconds: float = 0.0


class StepFigures:
    """Measures the steps since the last log line, and what is left."""

    def __init__(self, figures: RunFigures, *, engine: Engine, throughput: Throughput) -> None:
        """Measure steps of this run from here on."""
        self._figures = figures
        self._engine = engine
        self._throughput = throughput
        self._before = _Measured()

    def start(self) -> None:
        """Count the time from here on."""
        self._before = dataclasses.replace(
            self._before, session_seconds=self._throughput.session_seconds
        )

    def of(
        self,
        state: TrainState,
        *,
        loss: float,
        loss_mean: float,
        waited_seconds: float,
        memory: float | None,
    ) -> tuple[StepMetrics, float | None]:
        """Return a step's metrics, and the MFU that was refused where it cannot be.

        Args:
            state: After the step.
            loss: Mean over ranks, in nats a token.
            loss_mean: The same of all steps since the last call.
            waited_seconds: For batches, since the session began.
            memory: Peak share of the GPU's memory; None without a GPU.
        """
        figures, tokens = self._figures, self._figures.plan.tokens
        now = _Measured(
            self._throughput.steps,
            step_seconds=self._throughput.laps["step"],
            waited_seconds=waited_seconds,
            session_seconds=self._throughput.session_seconds,
        )
        before, self._before = self._before, now
        steps, passed = now.steps - before.steps, now.session_seconds - before.session_seconds
        seconds = (now.step_seconds - before.step_seconds) / steps if steps else None
        left = self._throughput.seconds_left(figures.cadence.ahead(state.step, figures.total_steps))
        mfu = figures.mfu(tokens / seconds) if seconds else None
        refused = mfu is not None and mfu > figures.credible_mfu
        metrics = StepMetrics(
            step=state.step,
            total_steps=figures.total_steps,
            tokens=state.tokens,
            epoch=state.position.epoch,
            loss=loss,
            loss_mean=loss_mean,
            best_loss=state.best_loss,
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
            tokens_per_second=steps * tokens / passed if passed > 0 else None,
            mfu_fraction=None if refused else mfu,
            mfu_refused=refused,
            data_wait_fraction=_share(waited_seconds - before.waited_seconds, of=passed),
            gpu_memory_fraction=memory,
            seconds_left=left,
            seconds_trained=state.seconds,
            cost_usd=state.cost_usd,
            cost_left_usd=cost_usd(left, figures.per_hour_usd),
        )
        return metrics, mfu if refused else None


def _share(seconds: float, *, of: float) -> float:
    return min(1.0, seconds / of) if of > 0 else 0.0
