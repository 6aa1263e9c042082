"""Fakes of a run's parts that record the calls of the loop."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from refocused.checkpoints.step.checkpoint_manifest import SaveReason
from refocused.config.batch_plan import BatchPlan
from refocused.config.cadence import Cadence
from refocused.config.optimization import OptimizerConfig, ScheduleConfig
from refocused.data.loader.batch import IGNORED_LABEL, Batch
from refocused.data.order.sequence_order import Order
from refocused.data.order.sequences import Position, SequenceRange
from refocused.engine.finite_updates import Judge, UpdateOutcome
from refocused.engine.schedule import RatePlan
from refocused.evaluate.multiple_choice import TaskResult
from refocused.metrics.run_time import RunTime
from refocused.metrics.throughput import StepPhases, Throughput
from refocused.system.world import World
from refocused.train.step.loop import Trainer
from refocused.train.step.spikes import SpikeWatch
from refocused.train.step.state import TrainState
from refocused.train.step.stopping import StopReason

Log = list[str]
OnSpike = Literal["warn", "skip", "rewind"]
OPTIMIZER = OptimizerConfig(lr=1e-3)
SCHEDULE = ScheduleConfig(kind="cosine", warmup_steps=2)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def batch(sequence: int, *, labels: int = 4, ignored: int = 0, source: str | None = None) -> Batch:
    """One row of `labels` labels, of which the first `ignored` do not count."""
    inputs, marked = torch.full((2, 1, labels), sequence)
    marked[:, :ignored] = IGNORED_LABEL
    return Batch(inputs, marked, np.array([0]), np.array([sequence]), ("a.npy",), source)


@dataclasses.dataclass
class FakeEngine:
    """Returns losses; the training loss is a function of the step (from 1) it belongs to.

    Updates from `refuses_from` on are refused, as all ranks' engines do after a gradient that is
    not finite on one of them.
    """

    log: Log
    training_loss: Callable[[int], float] = lambda step: 1.0
    validation: Callable[[Tensor, Tensor], float] = lambda inputs, labels: 2.0
    updates: int = 0
    norm: float | None = 1.5
    scale: float | None = None
    skipped_steps: int = 0
    refuses_from: int = 10**9
    phases: StepPhases = dataclasses.field(default_factory=StepPhases)

    def begin_step(self, passes: int) -> None:
        assert passes == 2

    def accumulate(self, input_ids: Tensor, labels: Tensor, *, weight: float) -> Tensor:
        assert weight == 1.0
        self.log.append(f"accumulate {int(input_ids[0, 0])}")
        return torch.tensor(self.training_loss(self.updates + 1))

    def update(self, learning_rate: float, judge: Judge) -> UpdateOutcome:
        self.updates += 1
        refused = self.updates >= self.refuses_from
        self.log.append("refuse" if refused else f"update {learning_rate:.6f}")
        return UpdateOutcome(not refused, judge.figures(self.norm))

    def validation_loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        self.log.append("validate")
        return torch.tensor(self.validation(input_ids, labels))

    def label_scores(
        self, input_ids: Tensor, labels: Tensor, *, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        """Score a row the higher, the smaller its first id is."""
        assert vocabulary == 500  # without the padding
        self.log.append(f"rate {len(input_ids)}")
        return -input_ids[:, 0].double(), torch.zeros(len(input_ids))

    def gradient_norm(self) -> float | None:
        return self.norm

    def loss_scale(self) -> float | None:
        return self.scale


@dataclasses.dataclass
class FakeLoader:
    """Batches of two passes a step, and its own stream; a step may not come.

    Sequences are counted on over the ends of epochs, as those of a mixture are.
    """

    log: Log
    missing_from: int = 10**9
    sequences_per_epoch: int = 0
    position: Position = dataclasses.field(default_factory=Position)
    wait_seconds: float = 0.0

    def batches_from(self, position: Position, *, made: int) -> FakeLoader:
        self.position = position
        return self

    def next_step(self, timeout_seconds: float | None = None) -> list[Batch] | None:
        first = self.position.sequences
        if first >= self.missing_from:
            self.log.append("waits")
            return None
        epochs = (first + 2) // self.sequences_per_epoch if self.sequences_per_epoch else 0
        self.position = Position(epochs, first + 2)
        return [batch(first), batch(first + 1)]

    def close(self) -> None:
        self.log.append("close")


@dataclasses.dataclass
class FakeReporter:
    """Records the calls."""

    log: Log
    figures: list[dict[str, object]] = dataclasses.field(default_factory=list)
    reported: list[list[float]] = dataclasses.field(default_factory=list)

    def step(
        self, state: TrainState, losses: Sequence[Tensor], waited_seconds: float
    ) -> TrainState:
        self.log.append(f"report {state.step}")
        self.reported.append([float(one.mean()) for one in losses])
        return dataclasses.replace(state, loss=self.reported[-1][-1])

    def validation(self, state: TrainState, seconds: float, by_source: Mapping[str, float]) -> None:
        self.log.append(f"tell {state.validation_loss}")

    def tasks(self, state: TrainState, results: Sequence[TaskResult], seconds: float) -> None:
        told = [f"{one.task} {one.measures['acc'].value:.2f}" for one in results]
        self.log.append(f"tell {' '.join(told)} after {state.step}")

    def sample(self, state: TrainState, text: str, seconds: float) -> None:
        self.log.append(f"tell {text!r} after {state.step}")

    def booked(self, state: TrainState) -> TrainState:
        return dataclasses.replace(state, seconds=7.0)

    def end(self, state: TrainState) -> TrainState:
        return state

    def run_time(self) -> RunTime:
        return RunTime()

    def performance(self, kind: str, step: int, **figures: object) -> None:
        self.figures.append({"kind": kind, "step": step, **figures})

    def event(self, kind: str, text: str, **facts: object) -> None:
        self.log.append(f"{kind}: {text}")


@dataclasses.dataclass
class FakeSaver:
    """Records saves; also acts as the mirror."""

    log: Log
    saved: list[TrainState] = dataclasses.field(default_factory=list)
    reasons: list[list[str]] = dataclasses.field(default_factory=list)
    waited: list[bool] = dataclasses.field(default_factory=list)
    commits: int = 0

    @property
    def mirror(self) -> FakeSaver:
        return self

    def watch(self) -> None:
        pass

    def commit(self) -> None:
        self.commits += 1

    def finishing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record_validation(self, state: TrainState) -> None:
        self.log.append(f"record {state.validation_loss} of {state.step}")

    def save(
        self, state: TrainState, reasons: Sequence[SaveReason], *, wait: bool = True
    ) -> TrainState:
        self.log.append(f"save {state.step}")
        self.saved.append(state)
        self.waited.append(wait)
        self.reasons.append([reason.value for reason in reasons])
        return state


@dataclasses.dataclass
class FakeStop:
    """Requests a stop once the log has an entry."""

    log: Log
    when: str | None = None

    def agreed(self) -> StopReason:
        return StopReason.SIGNAL if self.when in self.log else StopReason.NONE


def config_of(**sections: dict[str, Any]) -> Any:
    """A run's settings of these sections, as far as the loop reads them."""
    given = {
        "run": {"steps": 6, "on_spike": "warn", "max_rewinds": 2, "time_limit_hours": None},
        "schedule": {"warmup_steps": 0},
        "cost": {"budget_usd": None, "per_hour_usd": None},
        "model": {"vocabulary_multiple": 128},
    }
    names = given.keys() | sections
    return SimpleNamespace(
        **{name: SimpleNamespace(**given.get(name, {}) | sections.get(name, {})) for name in names}
    )


def watch_of(log: Log, action: OnSpike = "warn", *, warmup_steps: int = 0) -> SpikeWatch:
    """A watch that reports into the log, over one shard of 1,000 sequences."""
    return SpikeWatch(
        config_of(run={"on_spike": action}, schedule={"warmup_steps": warmup_steps}),
        Order([SequenceRange(0, 0, 1000)], seed=0, block_shards=1),
        report=lambda kind, text, **facts: log.append(f"{kind}: {text}"),
    )


def trainer_of(
    log: Log,
    *,
    world: World | None = None,
    total_steps: int = 6,
    cadence: Cadence | None = None,
    stop_when: str | None = None,
    loader: Any = None,
    validation_batches: Callable[[], Iterator[Batch]] = lambda: iter([batch(0)]),
    **changes: Any,
) -> Trainer:
    """Assemble the fakes; `changes` are further fields; stop once the log has `stop_when`."""
    data = SimpleNamespace(
        loader=loader or FakeLoader(log), validation_batches=validation_batches, validation_set=""
    )
    shape = SimpleNamespace(
        vocabulary=500,
        padded_vocabulary=lambda multiple: 512,
        width=1,
        settings={"initializer_range": 0.0},
    )
    fields = {
        "config": config_of(run={"steps": total_steps}),
        "shape": shape,
        "plan": BatchPlan(1, 2, 1, 4),
        "world": world or World(),
        "folder": Path("runs/sample"),
        "catalog": None,
        "stop": FakeStop(log, stop_when),
        "engine": FakeEngine(log),
        "data": data,
        "rates": RatePlan(OPTIMIZER.lr, total_steps, SCHEDULE),
        "cadence": cadence or Cadence(log=0, validation=0, checkpoint=0),
        "throughput": Throughput(Clock()),
        "reporter": FakeReporter(log),
        "saver": FakeSaver(log),
        "spikes": watch_of(log),
    }
    return Trainer(**cast("Any", fields | changes))


def rate(step: int, total: int) -> str:
    """Return the entry of the update that follows on `step` of `total` steps."""
    return f"update {RatePlan(OPTIMIZER.lr, total, SCHEDULE).at(step):.6f}"


def happened(log: Log, *words: str) -> list[str]:
    """Return the entries that begin with one of the words, in order."""
    return [entry for entry in log if entry.split()[0] in words]
