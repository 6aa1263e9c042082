"""Fakes of a run's parts that record the calls, and a trainer of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import torch
from checkpoints.fake_owner import FACTS, FakeOwner
from thread_ranks import on_two_ranks, results
from torch import Tensor

from refocused.checkpoints.mirror.mirror import Mirroring, MirrorStatus
from refocused.checkpoints.resume.changes import changes_since
from refocused.checkpoints.step.checkpoint_directory import FIRST_BRANCH, Branch, saved_steps
from refocused.checkpoints.step.checkpoint_manifest import RunMetadata, SaveReason
from refocused.checkpoints.step.checkpointer import Checkpointer
from refocused.config.batch_plan import BatchPlan
from refocused.config.cadence import Cadence
from refocused.config.optimization import OptimizerConfig, ScheduleConfig
from refocused.config.outputs import CheckpointConfig, EvaluationConfig
from refocused.data.loader.batch import IGNORED_LABEL, Batch
from refocused.data.order.sequence_order import Order
from refocused.data.order.sequences import Position, SequenceRange
from refocused.engine.finite_updates import Judge, UpdateOutcome
from refocused.engine.schedule import RatePlan
from refocused.evaluate.continuations import ValidationLoss
from refocused.evaluate.multiple_choice import TaskResult
from refocused.metrics.meter import Meter
from refocused.metrics.run_time import RunTime
from refocused.metrics.trackers import Record, Trackers
from refocused.system.processes import this_process
from refocused.system.world import World
from refocused.train.step.loop import Trainer
from refocused.train.step.reporter import Reporter
from refocused.train.step.saver import Saver
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

    def begin_step(self, passes: int) -> None:
        assert passes == 2

    def accumulate(self, input_ids: Tensor, labels: Tensor, *, weight: float) -> Tensor:
        assert weight == 1.0
        self.log.append(f"accumulate {int(input_ids[0, 0])}")
        return torch.tensor(self.training_loss(self.updates + 1))

    def update(self, learning_rate: float, judge: Judge, **others: float) -> UpdateOutcome:
        self.updates += 1
        refused = self.updates >= self.refuses_from
        self.log.append("refuse" if refused else f"update {learning_rate:.6f}")
        return UpdateOutcome(not refused, judge.figures(self.norm))

    def validation_loss(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        self.log.append("validate")
        return torch.tensor(self.validation(input_ids, labels))

    def label_losses(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.validation_loss(input_ids, labels)
        return mean.expand(labels.shape).where(labels != IGNORED_LABEL, 0.0), labels

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
        self.reported.append([float(loss.mean()) for loss in losses])
        return dataclasses.replace(state, loss=self.reported[-1][-1])

    def validation(
        self, state: TrainState, seconds: float, by_source: Mapping[str, ValidationLoss]
    ) -> None:
        self.log.append(f"tell {state.validation_loss}")

    def tasks(self, state: TrainState, results: Sequence[TaskResult], seconds: float) -> None:
        scores = [f"{result.task} {result.measures['acc'].value:.2f}" for result in results]
        self.log.append(f"tell {' '.join(scores)} after {state.step}")

    def sample(self, state: TrainState, text: str, seconds: float) -> None:
        self.log.append(f"tell {text!r} after {state.step}")

    def booked(self, state: TrainState) -> TrainState:
        return dataclasses.replace(state, seconds=7.0)

    def begin(self, state: TrainState) -> None: ...

    def end(self, state: TrainState) -> TrainState:
        return state

    def run_time(self) -> RunTime:
        return RunTime()

    def performance(self, kind: str, step: int, **figures: object) -> None:
        self.figures.append({"kind": kind, "step": step, **figures})

    def event(self, kind: str, text: str, **facts: object) -> None:
        self.log.append(f"{kind}: {text}")

    def write_state(self, state: TrainState, status: str, **facts: object) -> None:
        self.log.append(f"state {status} {facts}")

    def end_tracking(self, exit_code: int, *, limit_seconds: float) -> None:
        self.log.append(f"trackers end {int(exit_code)} within {limit_seconds:.0f}")

    def close(self) -> None:
        self.log.append("closed")


@dataclasses.dataclass
class FakeSaver:
    """Records saves; also acts as the mirror, which is complete in the end, or not."""

    log: Log
    saved: list[TrainState] = dataclasses.field(default_factory=list)
    reasons: list[list[str]] = dataclasses.field(default_factory=list)
    waited: list[bool] = dataclasses.field(default_factory=list)
    commits: int = 0
    branch: Branch = FIRST_BRANCH
    mirrored: bool = True
    saved_step: int | None = 6
    failures: int = 0
    drained: tuple[float, bool] | None = None  # the time-out, and whether a stop may end the wait
    skipped_uploads: int = 0

    @property
    def mirror(self) -> FakeSaver:
        return self

    @property
    def checkpointer(self) -> FakeSaver:
        return self

    def watch(self) -> None: ...

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

    def drain(self, timeout_s: float, progress: object, given_up: object = None) -> bool:
        self.drained = timeout_s, given_up is not None
        return self.mirrored


@dataclasses.dataclass
class FakeStop:
    """Requests a stop once the log has an entry."""

    log: Log
    when: str | None = None

    def agreed(self) -> StopReason:
        return StopReason.SIGNAL if self.when in self.log else StopReason.NONE


def config_of(**sections: Any) -> Any:
    """A run's settings of these sections, as far as the loop reads them."""
    given = {
        "run": {"name": "sample", "total_steps": 6, "on_spike": "warn", "max_rewinds": 2}
        | {"time_limit_hours": None},
        "schedule": {"warmup_steps": 0},
        "cost": {"budget_usd": None, "per_hour_usd": None},
        "model": {"vocabulary_multiple": 128, "embedding_std": None, "head_std": None},
        "checkpoint": CheckpointConfig(),
        "evaluation": EvaluationConfig(),
    }
    for name, section in sections.items():
        given[name] = given.get(name, {}) | section if isinstance(section, dict) else section
    return SimpleNamespace(
        **{name: SimpleNamespace(**s) if isinstance(s, dict) else s for name, s in given.items()}
    )


ORDER = Order([SequenceRange(0, 0, 1000)], seed=0, block_shards=1)  # a shard of 1,000 sequences


def watch_of(log: Log, action: OnSpike = "warn", *, warmup_steps: int = 0) -> SpikeWatch:
    """A watch that reports into the log."""
    return SpikeWatch(
        config_of(run={"on_spike": action}, schedule={"warmup_steps": warmup_steps}),
        ORDER,
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
        loader=loader or FakeLoader(log),
        validation_batches=validation_batches,
        validation_set="",
        order=ORDER,
        epoch_sequences={},
        files_done=lambda position: 1,
    )
    shape = SimpleNamespace(
        vocabulary=500,
        padded_vocabulary=lambda multiple: 512,
        width=1,
        tied=False,
        settings={"initializer_range": 0.0},
    )
    parts = {"reporter": FakeReporter(log), "saver": FakeSaver(log), "spikes": watch_of(log)}
    fields = {
        "config": config_of(run={"total_steps": total_steps}),
        "shape": shape,
        "plan": BatchPlan(1, 2, 1, 4),
        "world": world or World(),
        "folder": Path("runs/sample"),
        "catalog": None,
        "stop": FakeStop(log, stop_when),
        "engine": FakeEngine(log),
        "data": data,
        "rates": RatePlan(OPTIMIZER, total_steps, SCHEDULE),
        "cadence": cadence or Cadence(log=0, validation=0, checkpoint=0),
        "meter": Meter(Clock()),
    }
    given = fields | parts | changes
    trainer = Trainer(**cast("Any", {key: given[key] for key in given if key not in parts}))
    for name in parts:
        setattr(trainer, name, given[name])
    return trainer


def rate(step: int, total: int) -> str:
    """Return the entry of the update that follows on `step` of `total` steps."""
    return f"update {RatePlan(OPTIMIZER, total, SCHEDULE).at(step):.6f}"


def happened(log: Log, *words: str) -> list[str]:
    """Return the entries that begin with one of the words, in order."""
    return [entry for entry in log if entry.split()[0] in words]


PLAN = BatchPlan(
    micro_batch_size=2, gradient_accumulation_steps=3, world_size=1, sequence_length=100
)  # 600 tokens


class Reporting:
    """A reporter with a fake clock and engine, and its files."""

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int = 100,
        per_hour_usd: float | None = None,
        plan: BatchPlan = PLAN,
        cadence: Cadence | None = None,
        world: World | None = None,
        engine: FakeEngine | None = None,
        **given: Any,
    ) -> None:
        self.folder, self.clock, self.plan = folder, Clock(), plan
        self.meter = Meter(self.clock)
        trainer = trainer_of(
            [],
            config=config_of(run={"total_steps": total_steps}, cost={"per_hour_usd": per_hour_usd}),
            folder=folder,
            world=world,
            engine=engine or FakeEngine([]),
            meter=self.meter,
            total_steps=total_steps,
            plan=plan,
            cadence=cadence or Cadence(log=1, validation=50, checkpoint=25),
        )
        self.reporter = Reporter(trainer, mfu=lambda speed: speed / 1200, **given)

    def step(
        self, state: TrainState, *, seconds: float, waited: float = 0.0, work: float = 1.0
    ) -> TrainState:
        self.clock.now += seconds
        self.meter.lap("step", work=work)
        return self.reporter.step(state, [torch.tensor([3.0])], waited)

    def records(self, file: str = "training_metrics") -> list[dict[str, Any]]:
        lines = (self.folder / "logs" / f"{file}.jsonl").read_text().splitlines()
        return [json.loads(line, parse_constant=refuse_constant) for line in lines]

    def state_file(self) -> dict[str, Any]:
        text = (self.folder / "state.json").read_text()
        return cast("dict[str, Any]", json.loads(text, parse_constant=refuse_constant))


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


class Listening:
    """Stands for the trackers of a reporter."""

    def __init__(self, session: Reporting) -> None:
        self.records: list[Record] = []
        self.ends: list[tuple[int, float]] = []
        session.reporter.track(cast("Trackers", self))

    def record(self, record: Record) -> None:
        self.records.append(record)

    def close(self, exit_code: int, *, limit_seconds: float) -> None:
        self.ends.append((exit_code, limit_seconds))


def status_of_mirror(**facts: Any) -> MirrorStatus:
    return MirrorStatus(bucket="b", prefix="p", process=this_process(), heartbeat=0.0, **facts)


@dataclasses.dataclass
class FakeMirror:
    """A fake mirror that a test controls."""

    log: Log
    said: MirrorStatus | None = None
    drains: bool | None = True  # None: it never finishes

    def start(self, branch: Branch | None = None) -> None:
        self.log.append("mirror started")

    def ensure_alive(self) -> bool:
        self.log.append("mirror looked after")
        return False

    def status(self) -> MirrorStatus | None:
        return self.said

    def request_drain(self, timeout_s: float) -> None:
        self.log.append(f"drain {timeout_s:.0f}")

    def await_drain(self, slice_s: float, progress: Callable[[Any], None]) -> bool | None:
        return self.drains


class Saving:
    """A saver with a real folder of checkpoints, on a disk that a test can fill."""

    def __init__(
        self,
        folder: Path,
        *,
        world: World | None = None,
        mirror: FakeMirror | None = None,
        branch: Branch = FIRST_BRANCH,
        least_bytes: int = 0,
        facts: RunMetadata = FACTS,
        allowed: tuple[str, ...] = (),
        in_background: bool = False,
        **checkpoint: Any,
    ) -> None:
        self.folder, self.clock = folder, Clock()
        self.log: Log = []
        world = world or World()
        self.owner, self.meter = FakeOwner(world.rank), Meter(self.clock)
        self.reporter = FakeReporter(self.log)
        settings = {"keep": 2, "async": in_background, **checkpoint}
        trainer = trainer_of(
            self.log,
            config=config_of(checkpoint=CheckpointConfig.model_validate(settings)),
            world=world,
            engine=self.owner,
            meter=self.meter,
            reporter=self.reporter,
        )
        self.saver = Saver(
            trainer,
            Checkpointer(
                folder, world=world, metadata=facts, branch=branch, least_bytes=least_bytes
            ),
            mirror=Mirroring(cast("Any", mirror), report=self.reporter.event, world=world),
            compare=functools.partial(
                changes_since, metadata=facts, world_size=world.world_size, allowed=allowed
            ),
        )
        self.saver.folder = folder

    def save(self, *steps: int, **changes: Any) -> TrainState:
        for step in steps:
            state = self.saver.save(TrainState(step=step, **changes))
        return state

    def there(self) -> list[int]:
        return saved_steps(self.folder)


def on_machines(root: Path, action: Callable[[Saving], Any]) -> list[Any]:
    """Run the same action on two machines with a folder each."""

    def on_one(world: World) -> Any:
        folder = root / f"machine_{world.rank}"
        folder.mkdir(exist_ok=True)
        return action(Saving(folder, world=world))

    return results(on_two_ranks(on_one, machines=2))
