"""A reporter over a real folder, and the files it writes there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from run_fakes import OPTIMIZER, SCHEDULE, Clock, FakeEngine

from refocused.config.batch_plan import BatchPlan
from refocused.engine.engine import Engine
from refocused.metrics.throughput import Throughput
from refocused.system.world import World
from refocused.train.step.reporter import Reporter
from refocused.train.step.state import TrainState
from refocused.train.step.step_figures import Cadence, RunFigures

PLAN = BatchPlan(micro=2, accumulation=3, world_size=1, sequence_length=100)  # 600 tokens


class Session:
    """A reporter with a clock and an engine that the test moves."""

    def __init__(
        self,
        folder: Path,
        *,
        per_hour_usd: float | None = None,
        world: World | None = None,
        epoch_windows: dict[str, int] | None = None,
        total_steps: int = 100,
        cadence: Cadence | None = None,
    ) -> None:
        self.folder = folder
        self.clock = Clock()
        self.engine = FakeEngine([])
        self.throughput = Throughput(self.clock)
        self.reporter = Reporter(
            folder,
            figures=RunFigures(
                name="sample",
                total_steps=total_steps,
                plan=PLAN,
                optimizer=OPTIMIZER,
                schedule=SCHEDULE,
                cadence=cadence or Cadence(log=1, validation=50, checkpoint=25),
                mfu=lambda speed: speed / 1200,
                per_hour_usd=per_hour_usd,
                epoch_windows=epoch_windows or {},
            ),
            engine=cast("Engine", self.engine),
            throughput=self.throughput,
            world=world or World(),
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
