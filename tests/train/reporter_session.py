"""A reporter with a fake clock, engine and trackers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from run_fakes import OPTIMIZER, SCHEDULE, Clock, FakeEngine

from refocused.config.batch_plan import BatchPlan
from refocused.config.cadence import Cadence
from refocused.engine.engine import Engine
from refocused.engine.schedule import RatePlan
from refocused.metrics.throughput import Throughput
from refocused.metrics.trackers import Record, Trackers
from refocused.system.world import World
from refocused.train.step.reporter import Reporter
from refocused.train.step.state import TrainState
from refocused.train.step.step_figures import RunFigures

PLAN = BatchPlan(
    micro_batch_size=2, gradient_accumulation_steps=3, world_size=1, sequence_length=100
)  # 600 tokens


class Session:
    """A reporter with a fake clock and engine, and its files."""

    def __init__(
        self,
        folder: Path,
        *,
        world: World | None = None,
        engine: Any = None,
        more_of_state: Callable[[], dict[str, object]] = dict,
        command_began_seconds: float | None = None,
        **figures: Any,
    ) -> None:
        self.folder = folder
        self.clock = Clock()
        self.throughput = Throughput(self.clock)
        given: dict[str, Any] = {
            "name": "sample",
            "total_steps": 100,
            "plan": PLAN,
            "rates": RatePlan(OPTIMIZER.lr, 100, SCHEDULE),
            "cadence": Cadence(log=1, validation=50, checkpoint=25),
            "mfu": lambda speed: speed / 1200,
            "per_hour_usd": None,
        }
        self.plan = (given | figures)["plan"]
        self.reporter = Reporter(
            folder,
            figures=RunFigures(**given | figures),
            engine=cast("Engine", engine or FakeEngine([])),
            throughput=self.throughput,
            world=world or World(),
            more_of_state=more_of_state,
            command_began_seconds=command_began_seconds,
        )

    def step(
        self, state: TrainState, *, seconds: float, waited: float = 0.0, loss: float = 3.0
    ) -> TrainState:
        self.clock.now += seconds
        self.throughput.lap("step")
        return self.reporter.step(state, [torch.tensor([loss])], waited)

    def records(self, file: str = "training_metrics") -> list[dict[str, Any]]:
        lines = (self.folder / "logs" / f"{file}.jsonl").read_text().splitlines()
        return [json.loads(line, parse_constant=refuse_constant) for line in lines]

    def state_file(self) -> dict[str, Any]:
        text = (self.folder / "state.json").read_text()
        found: dict[str, Any] = json.loads(text, parse_constant=refuse_constant)
        return found


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


class Listening:
    """Stands for the trackers."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.ends: list[tuple[int, float]] = []

    def record(self, record: Record) -> None:
        self.records.append(record)

    def close(self, exit_code: int, *, limit_seconds: float) -> None:
        self.ends.append((exit_code, limit_seconds))


def listened(session: Session) -> Listening:
    listening = Listening()
    session.reporter.track(cast("Trackers", listening))
    return listening
