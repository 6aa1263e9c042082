"""When a run logs, evaluates and saves, and what it measures of its steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch
from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.config.batch_plan import times_left
from refocused.config.prices import cost_usd
from refocused.engine.schedule import learning_rate
from refocused.estimate.flops import CREDIBLE_MFU
from refocused.metrics.step_metrics import StepMetrics

if TYPE_CHECKING:
    from refocused.config.batch_plan import BatchPlan
    from refocused.config.optimization import OptimizerConfig, ScheduleConfig
    from refocused.engine.engine import Engine
    from refocused.metrics.throughput import Activity, Throughput
    from refocused.train.step.state import TrainState

Interval = Literal["log", "validation", "checkpoint", "tasks", "sample", "histograms"]


@dataclasses.dataclass(frozen=True, slots=True)
class Cadence:
    """Intervals in optimizer steps; 0 is never."""

    log: int
    validation: int
    checkpoint: int
    keep_epochs: bool = False  # save at the end of an epoch too
    save_best: bool = False  # save after the best validation so far too
    tasks: int = 0
    sample: int = 0
    histograms: int = 0  # between histograms of weights and gradients

    def due(self, what: Interval, step: int) -> bool:
        """Whether this is due at the end of a step."""
        interval: int = getattr(self, what)
        return interval > 0 and step % interval == 0

    def evaluation_due(self, step: int) -> bool:
        """Whether a validation, tasks or a sample follow a step."""
        return self.due("validation", step) or self.due("tasks", step) or self.due("sample", step)

    def reasons_to_save(
        self, step: int, *, last: bool, epoch_ended: bool, is_best: bool, stopping: bool
    ) -> tuple[SaveReason, ...]:
        """Return why to save after a step; nothing: there is no save.

        `last` is the run's last step; `stopping` saves even if nothing else is due.
        """
        due = {
            SaveReason.ROLLING: self.due("checkpoint", step),
            SaveReason.EPOCH: self.keep_epochs and epoch_ended,
            SaveReason.FINAL: last,
            SaveReason.BEST: self.save_best and is_best,
        }
        reasons = tuple(reason for reason, is_due in due.items() if is_due)
        return reasons or ((SaveReason.EMERGENCY,) if stopping else ())

    def ahead(self, step: int, total_steps: int) -> dict[Activity, int]:
        """Count what is still to be done when a step is logged, including the ending.

        What is due after this step comes after its log line; the last step has one of each, whose
        sample is part of the ending. Every validation is assumed to be the best so far and to be
        followed by a save, because losses fall.
        """

        def left(interval: int) -> int:
            return times_left(step - 1, total_steps, interval)

        validations, saves = left(self.validation), left(self.checkpoint)
        if self.save_best and self.validation:
            saves += validations - left(math.lcm(self.checkpoint, self.validation))
        return {
            "step": total_steps - step,
            "validation": validations,
            "tasks": left(self.tasks),
            "sample": left(self.sample),
            "save": saves,
            "ending": 1,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class RunFigures:
    """What does not change during a run."""

    name: str
    total_steps: int
    plan: BatchPlan
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    cadence: Cadence
    mfu: Callable[[float], float | None]  # of tokens a second; None if the GPU is unknown
    per_hour_usd: float | None  # price of the machine; None: unknown
    branch: Branch = FIRST_BRANCH
    credible_mfu: float = CREDIBLE_MFU  # a larger MFU is not reported
    epoch_windows: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of each source


@dataclasses.dataclass(frozen=True, slots=True)
class _Totals:
    """A session's totals at a log line."""

    steps: int = 0
    step_seconds: float = 0.0
    waited_seconds: float = 0.0
    session_seconds: float = 0.0


class StepFigures:
    """Measures the steps since the last log line, and what is left."""

    def __init__(self, figures: RunFigures, *, engine: Engine, throughput: Throughput) -> None:
        self._figures = figures
        self._engine = engine
        self._throughput = throughput
        self._before = _Totals()

    def start(self) -> None:
        """Measure the time from here on."""
        self._before = _Totals(session_seconds=self._throughput.session_seconds)

    def of(
        self,
        state: TrainState,
        *,
        loss: float,
        loss_mean: float,
        waited_seconds: float,
        memory: float | None,
    ) -> StepMetrics:
        """Return a step's metrics.

        `loss_mean` is over all steps since the last call, `waited_seconds` since the session began,
        `memory` the peak share of the GPU's memory.
        """
        figures, engine, tokens = self._figures, self._engine, self._figures.plan.tokens
        now = _Totals(
            self._throughput.steps,
            step_seconds=self._throughput.laps["step"],
            waited_seconds=waited_seconds,
            session_seconds=self._throughput.session_seconds,
        )
        before, self._before = self._before, now
        steps, passed = now.steps - before.steps, now.session_seconds - before.session_seconds
        seconds = (now.step_seconds - before.step_seconds) / steps if steps else None
        waited = waited_seconds - before.waited_seconds
        left = self._throughput.seconds_left(figures.cadence.ahead(state.step, figures.total_steps))
        mfu = figures.mfu(tokens / seconds) if seconds else None
        refused = mfu is not None and mfu > figures.credible_mfu
        return StepMetrics(
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
            gradient_norm=engine.gradient_norm(),
            loss_scale=engine.loss_scale(),
            skipped_steps=engine.skipped_steps,
            step_seconds=seconds,
            tokens_per_second=steps * tokens / passed if passed > 0 else None,
            mfu_fraction=None if refused else mfu,
            mfu_refused=refused,
            data_wait_fraction=min(1.0, waited / passed) if passed > 0 else 0.0,
            gpu_memory_fraction=memory,
            seconds_left=left,
            seconds_trained=state.seconds,
            cost_usd=state.cost_usd,
            cost_left_usd=cost_usd(left, figures.per_hour_usd),
        )
