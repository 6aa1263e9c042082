"""The parts of a run as the loop uses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the loop only calls its parts
    from refocused.config.batch_plan import BatchPlan
    from refocused.config.optimization import OptimizerConfig, ScheduleConfig
    from refocused.data.loader.batch import Batch
    from refocused.data.loader.loader import Loader
    from refocused.engine.engine import Engine
    from refocused.evaluate.multiple_choice import Examination
    from refocused.metrics.throughput import Throughput
    from refocused.system.world import World
    from refocused.train.step.evaluation import Sampler
    from refocused.train.step.profile import StepProfiler
    from refocused.train.step.reporter import Reporter
    from refocused.train.step.saver import Saver
    from refocused.train.step.step_figures import Cadence


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Everything the loop needs, built once by `refocused.train.lifecycle.run`.

    Attributes:
        validation_batches: Yields this rank's validation batches, the same ones at every call;
            none without validation data.
        vocabulary: Ids that can be predicted.
        vocabulary_rows: Rows of the embedding, padding included.
        untrained_loss: What a right initialisation gives on random tokens, in nats.
        tasks: Questions that are put to the model, the same on every rank.
        sampler: Lets the model write; None: it is not asked to.
        profiler: Traces some of this session's steps; None: on other ranks, and when not asked to.
    """

    world: World
    engine: Engine
    loader: Loader
    validation_batches: Callable[[], Iterator[Batch]]
    plan: BatchPlan
    total_steps: int
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    cadence: Cadence
    throughput: Throughput
    reporter: Reporter
    saver: Saver
    vocabulary: int
    vocabulary_rows: int
    untrained_loss: float
    tasks: Sequence[Examination] = ()
    sampler: Sampler | None = None
    profiler: StepProfiler | None = None
