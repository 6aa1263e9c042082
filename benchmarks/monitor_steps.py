"""What being watched costs training: the CPU time of steps with everything on, and with nothing.

One process trains in blocks of steps that take turns: those with everything on note each step's
phases, report every tenth step (log line, metrics, state) to the run's files and to all trackers,
and end when the trackers' threads have written what they were told; beside them the sampler works.
Those with nothing on only train, the sampler held. One process, since two differ by more than is to
be told, in where their memory lies. What watching itself takes is besides measured alone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from measuring import Record, say
from step import alone
from step_contenders import FLOAT32, OPTIMIZER, Setup, settings_of

from refocused.config.batch_plan import BatchPlan
from refocused.config.optimization import ScheduleConfig
from refocused.config.outputs import TrackingConfig
from refocused.engine.build_engine import build_engine
from refocused.engine.engine import Engine
from refocused.metrics.throughput import Throughput
from refocused.metrics.trackers import Record as TrackerRecord
from refocused.metrics.trackers import TrackedRun, Tracker, Trackers, trackers_of
from refocused.models.causal_lm import counted_parameters
from refocused.system import logs
from refocused.system.world import World
from refocused.train.step.guards import FiniteSteps, StepTaken
from refocused.train.step.reporter import Reporter
from refocused.train.step.state import TrainState
from refocused.train.step.step_figures import Cadence, RunFigures

LOG_STEPS = 10  # as a run that says nothing of it
OPEN_SECONDS, CLOSE_SECONDS = 90.0, 30.0  # that trackers may take
IDLE_SECONDS = 5.0  # in which nothing is trained, and the trackers' threads wait
CONFIDENCE = 0.95
SETUP = Setup(layers=4, width=256, vocabulary=2048, length=512, micro=1, accumulation=1)


class Told:
    """A tracker that says when it is open, and how many records it has taken."""

    def __init__(self, tracker: Tracker) -> None:
        """Stand before a tracker."""
        self.name = tracker.name
        self._tracker = tracker
        self.tried = threading.Event()
        self.is_open = False
        self.taken = 0

    def open(self) -> str:
        """Open it."""
        try:
            said = self._tracker.open()
            self.is_open = True
            return said
        finally:
            self.tried.set()

    def write(self, record: TrackerRecord) -> None:
        """Let it take a record; one that it refuses counts too."""
        try:
            self._tracker.write(record)
        finally:
            self.taken += 1

    def close(self, exit_code: int) -> str:
        """End it."""
        return self._tracker.close(exit_code)


class Training:
    """A small model in training, watched or not, block by block."""

    def __init__(self, run: Path, sampler_pid: int, world: World) -> None:
        """Build the model and open everything.

        Args:
            run: Its folder.
            sampler_pid: The sampler that watches it.
            world: Of one rank.
        """
        self._sampler_pid = sampler_pid
        self._world = world
        engine = _engine(world)
        self._take = _steps(engine, world)
        self._throughput = Throughput(time.monotonic)
        self._reporter = self._reporter_of(run, engine)
        self.trackers = [Told(one) for one in _all_trackers(run)]
        self._tracker_threads = set[int]()
        self._step = self._reported = 0
        _log_to(run)

    @contextlib.contextmanager
    def tracked(self) -> Iterator[None]:
        """Open the trackers, and end them."""
        before = _threads()
        self._reporter.track(Trackers(self.trackers, report=self._reporter.event))
        for tracker in self.trackers:
            if not tracker.tried.wait(OPEN_SECONDS) or not tracker.is_open:
                raise SystemExit(f"{tracker.name} did not open: not everything would be on")
        self._tracker_threads = _threads() - before
        try:
            yield
        finally:
            os.kill(self._sampler_pid, signal.SIGCONT)
            self._reporter.end_tracking(0, limit_seconds=CLOSE_SECONDS)
            self._reporter.close()

    def block(self, steps: int, *, watched: bool) -> dict[str, float]:
        """Take steps; return what each of them took, in milliseconds.

        `telling` is the CPU time of the training thread in all that watching adds to it, and
        `others` that of the threads which came with the trackers.
        """
        os.kill(self._sampler_pid, signal.SIGCONT if watched else signal.SIGSTOP)
        gc.collect()  # training does this between steps, watched or not
        others, cpu, wall = self._others_seconds(), time.process_time(), time.perf_counter()
        telling = 0.0
        for _ in range(steps):
            self._step += 1
            telling += self._watched_step() if watched else self._bare_step()
        passed = time.perf_counter() - wall
        self._wait_for_trackers()
        used, others = time.process_time() - cpu, self._others_seconds() - others
        each = 1000 / steps
        return {
            "CPU time": each * used,
            "wall time": each * passed,
            "telling": each * telling,
            "others": each * others,
        }

    def idle_core_fraction(self) -> float:
        """Return the share of a core that the trackers' threads take when nothing is told."""
        began, cpu = time.monotonic(), self._others_seconds()
        time.sleep(IDLE_SECONDS)
        return (self._others_seconds() - cpu) / (time.monotonic() - began)

    def _others_seconds(self) -> float:
        return sum(_thread_seconds(thread) for thread in self._tracker_threads)

    def _bare_step(self) -> float:
        self._take()
        return 0.0

    def _watched_step(self) -> float:
        """Take a step as the loop does; return the CPU seconds of what watching added."""
        began = time.thread_time()
        self._throughput.begin_step()
        telling = time.thread_time() - began
        loss = self._take()
        began = time.thread_time()
        self._throughput.begin_update()
        self._throughput.end_step()
        self._throughput.lap("step")
        if self._step % LOG_STEPS == 0:
            state = TrainState(step=self._step, tokens=self._step * SETUP.length)
            self._reporter.step(state, [loss.reshape(1)], 0.0)
            self._reported += 1
        return telling + time.thread_time() - began

    def _wait_for_trackers(self) -> None:
        while any(tracker.taken < self._reported for tracker in self.trackers):
            time.sleep(0.002)

    def _reporter_of(self, run: Path, engine: Engine) -> Reporter:
        figures = RunFigures(
            name="watched",
            total_steps=10**6,
            plan=BatchPlan(SETUP.micro, SETUP.accumulation, 1, SETUP.length),
            optimizer=OPTIMIZER,
            schedule=ScheduleConfig(),
            cadence=Cadence(log=LOG_STEPS, validation=1000, checkpoint=1000),
            mfu=lambda speed: None,
            per_hour_usd=24.0,
        )
        return Reporter(
            run, figures=figures, engine=engine, throughput=self._throughput, world=self._world
        )


def step_cost(run: Path, sampler_pid: int, *, pairs: int, steps: int) -> Record:
    """Measure pairs of blocks; return the rows of the tables, and all pairs.

    Args:
        run: The run's folder.
        sampler_pid: The sampler that watches it.
        pairs: Of blocks; which of the two comes first changes from pair to pair.
        steps: Of a block.
    """
    training = Training(run, sampler_pid, alone())
    gc.disable()
    with training.tracked():
        names = ["sampler", *(tracker.name for tracker in training.trackers)]
        say(f"steps, {pairs} pairs of blocks of {steps}, with {', '.join(names)}")
        training.block(steps, watched=True)
        training.block(steps, watched=False)
        found = [_pair(training, steps, watched_first=pair % 2 == 0) for pair in range(pairs)]
        idle = training.idle_core_fraction()
    rows = {kind: _row(found, kind) for kind in ("CPU time", "wall time")}
    telling = statistics.median(on["telling"] for on, _ in found)
    others = statistics.median(on["others"] for on, _ in found)  # idle or not
    return {
        "on": names,
        "rows": rows,
        "watching": {
            "telling_us": 1000 * telling,
            "others_us": 1000 * others,
            "idle_percent": 100 * idle,
            "share_percent": 100 * (telling + others) / rows["CPU time"]["off_ms"],
        },
        "pairs": [{"on": on, "off": off} for on, off in found],
    }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return between which two values the true median lies, whatever they are spread like.

    By the signs: k or fewer of n values are below it with the probability of k heads of n coins.
    """
    ordered, beyond, below = sorted(values), 0, 0.0
    while beyond < (len(ordered) - 1) // 2:
        below += math.comb(len(ordered), beyond) / 2 ** len(ordered)
        if 2 * below > 1 - CONFIDENCE:
            break
        beyond += 1
    cut = max(0, beyond - 1)
    return ordered[cut], ordered[-1 - cut]


def _pair(
    training: Training, steps: int, *, watched_first: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Return a block with everything on and one with nothing."""
    first = training.block(steps, watched=watched_first)
    second = training.block(steps, watched=not watched_first)
    return (first, second) if watched_first else (second, first)


def _row(pairs: Sequence[tuple[dict[str, float], dict[str, float]]], kind: str) -> Record:
    ratios = [on[kind] / off[kind] for on, off in pairs]
    low, high = median_interval(ratios)
    return {
        "off_ms": statistics.median(off[kind] for _, off in pairs),
        "on_ms": statistics.median(on[kind] for on, _ in pairs),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "spread": statistics.stdev(ratios) if len(ratios) > 1 else None,
    }


def _all_trackers(run: Path) -> list[Tracker]:
    """Return every tracker there is; Weights & Biases where it is installed, without a network."""
    os.environ["WANDB_MODE"] = "offline"
    has_wandb = importlib.util.find_spec("wandb") is not None
    if not has_wandb:
        say("wandb is not installed: left out of everything that is on")
    tracking = TrackingConfig(
        wandb="benchmark" if has_wandb else None,
        tensorboard=True,
        openmetrics=str(run / "refocused.prom"),
    )
    settings = {"model": SETUP.shape(), "optimizer": OPTIMIZER.model_dump()}
    return trackers_of(TrackedRun(run, "watched", step=0, settings=settings, tracking=tracking))


def _threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def _thread_seconds(thread: int) -> float:
    """Return the CPU time of a thread of this process; 0 where it has ended."""
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def _log_to(run: Path) -> None:
    """Write log lines to the files that a rank has, and none to the screen."""
    logging.getLogger(logs.LOGGER_NAME).handlers.clear()
    logging.getLogger(logs.LOGGER_NAME).propagate = False
    logging.getLogger(logs.LOGGER_NAME).setLevel(logging.INFO)
    logs.start_files(run / "logs", rank=0)


def _engine(world: World) -> Engine:
    model = SETUP.model()
    return build_engine(
        model,
        block_class=model.block_class,
        settings=settings_of(SETUP, 0, world, parameters=counted_parameters(model)),
        optimizer=OPTIMIZER,
        precision=FLOAT32,
        world=world,
    )


def _steps(engine: Engine, world: World) -> Callable[[], torch.Tensor]:
    """Return what takes a step as the loop does."""
    inputs, labels = SETUP.batch()
    finite = FiniteSteps(world, overflows=False)

    def take() -> torch.Tensor:
        losses = torch.stack([engine.accumulate(inputs, labels) for _ in range(SETUP.accumulation)])
        finite.add(StepTaken(0, losses, engine.update(OPTIMIZER.lr), ()))
        return losses.mean()

    return take
