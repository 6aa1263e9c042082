"""The parts of a run that the loop uses; their types alone, so that the loop imports none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refocused.config.batch_plan import BatchPlan
    from refocused.config.optimization import OptimizerConfig, ScheduleConfig
    from refocused.data.loader.batch import Batch
    from refocused.data.loader.loader import Loader
    from refocused.engine.engine import Engine
    from refocused.evaluate.multiple_choice import Examination
    from refocused.metrics.throughput import Throughput
    from refocused.system.world import World
    from refocused.train.step.evaluation import TextSampler
    from refocused.train.step.profile import StepProfiler
    from refocused.train.step.reporter import Reporter
    from refocused.train.step.saver import Saver
    from refocused.train.step.step_figures import Cadence


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Everything the loop needs, built once by `refocused.train.lifecycle.build_run`."""

    world: World
    engine: Engine
    loader: Loader
    validation_batches: Callable[[], Iterator[Batch]]  # the same ones at every call
    plan: BatchPlan
    total_steps: int
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    cadence: Cadence
    throughput: Throughput
    reporter: Reporter
    saver: Saver
    vocabulary: int  # ids that can be predicted
    vocabulary_rows: int  # rows of the embedding, padding included
    untrained_loss: float  # expected loss of a right initialisation on random tokens, in nats
    tasks: Sequence[Examination] = ()  # tasks to evaluate, the same on every rank
    sampler: TextSampler | None = None  # writes text samples; None if the run has no prompt
    profiler: StepProfiler | None = None  # None on other ranks and without `--profile`
