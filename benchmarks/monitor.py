"""What watching a run costs: the sampler's share of a core, and training with it and without.

    python benchmarks/monitor.py [--seconds 60] [--pairs 15] [--steps 10]

The sampler watches eight GPUs of a compiled stand-in for NVIDIA's library (tests/monitoring), once
a second, beside a run whose files change ten times a second. The stand-in answers at once: the time
that a driver takes is not in these figures. Training takes blocks of steps in turns: with the
sampler at work and the reporter's line, metrics and state file at the last step of each block; and
without, the sampler held. CPU time is that of the process that trains; on a busy machine wall time
says little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from measuring import ROOT, Column, Record, medians, say, table, write_report
from step import alone
from step_contenders import FLOAT32, OPTIMIZER, Setup, settings_of

from refocused.config.batch_plan import BatchPlan
from refocused.config.optimization import ScheduleConfig
from refocused.engine.build import build_engine
from refocused.engine.engine import Engine
from refocused.models.causal_lm import counted_parameters
from refocused.monitoring.records import JsonLines, write_state
from refocused.monitoring.sampler_process import start_sampler
from refocused.monitoring.sampler_settings import SamplerSettings
from refocused.monitoring.step_phases import step_phases
from refocused.monitoring.throughput import Throughput
from refocused.monitoring.time_book import TimeBook
from refocused.process_identity import identify
from refocused.training.cadence import Cadence
from refocused.training.finite_steps import FiniteSteps, StepTaken
from refocused.training.reporter import Reporter
from refocused.training.state import TrainState
from refocused.training.step_figures import RunFigures
from refocused.world import World

sys.path.insert(0, str(ROOT / "tests" / "monitoring"))

GPUS = 8
WARM_SECONDS = 5.0  # of the sampler, for its imports and first readings
SETUP = Setup(layers=4, width=256, vocabulary=2048, length=512, micro=1, accumulation=1)
MOST_CORE_FRACTION, MOST_STEP_RATIO = 0.005, 1.005
SAMPLER_COLUMNS = (
    Column("core_percent", "% of a core", "{:.3f}"),
    Column("round_ms", "CPU ms a round", "{:.2f}"),
    Column("start_ms", "CPU ms to start", "{:,.0f}"),
    Column("memory_mib", "memory, MiB", "{:,.0f}"),
    Column("bytes_a_round", "bytes a round", "{:,.0f}"),
)
STEP_COLUMNS = (
    Column("off_ms", "off, ms", "{:,.2f}"),
    Column("on_ms", "on, ms", "{:,.2f}"),
    Column("ratio", "on/off", "{:.4f}"),
)


def main() -> None:
    """Measure, print the tables, write everything down; fail where it costs too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of watching the sampler")
    parser.add_argument("--pairs", type=int, default=15, help="of blocks with and without")
    parser.add_argument("--steps", type=int, default=10, help="of a block, and between log lines")
    parser.add_argument("--json", type=Path, default=Path("/tmp/refocused-benchmarks/monitor.json"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sampler(Path(folder)) as (run, pid):
        say(f"the sampler, {chosen.seconds:.0f} s")
        watching = sampler_cost(run, pid, seconds=chosen.seconds)
        say(f"steps, {chosen.pairs} pairs of blocks")
        pairs = step_cost(run, pid, pairs=chosen.pairs, steps=chosen.steps)
    rows = {kind: medians([pair[kind] for pair in pairs]) for kind in ("CPU time", "wall time")}
    title = f"The sampler at 1 Hz over {GPUS} GPUs"
    print(table({"sampler": watching}, SAMPLER_COLUMNS, title=title))
    print(table(rows, STEP_COLUMNS, title=f"A step, log line every {chosen.steps}"))
    write_report(
        chosen.json,
        settings={"seconds": chosen.seconds, "pairs": chosen.pairs, "steps": chosen.steps},
        results={"sampler": watching, "steps": pairs, "rows": rows},
    )
    too_much = watching["core_percent"] > 100 * MOST_CORE_FRACTION
    sys.exit(int(too_much or rows["CPU time"]["ratio"] > MOST_STEP_RATIO))


@contextlib.contextmanager
def sampler(folder: Path) -> Iterator[tuple[Path, int]]:
    """Start a sampler over the stand-in's GPUs; yield the run's folder and its process id."""
    from nvml_machine import Machine, build_stand_in

    library = build_stand_in(folder)
    machine = Machine(folder / "gpus.txt", gpus=GPUS)
    os.environ.update({**machine.environment, "LD_LIBRARY_PATH": str(library.parent)})
    run = folder / "run"
    with subprocess.Popen(["sleep", "86400"]) as rank:  # what the sampler ends with
        identity = identify(rank.pid)
        assert identity is not None
        try:
            yield (
                run,
                start_sampler(
                    SamplerSettings(run=run, training=identity, interval_seconds=1.0, ranks=GPUS)
                ),
            )
        finally:
            rank.kill()


def sampler_cost(run: Path, pid: int, *, seconds: float) -> Record:
    """Return what the sampler takes while the run's files change ten times a second."""
    done = threading.Event()
    writer = threading.Thread(target=_write_files, args=(run, done))
    writer.start()
    time.sleep(WARM_SECONDS)
    samples = run / "logs" / "gpu_metrics.jsonl"
    began, cpu, size = time.monotonic(), _cpu_seconds(pid), samples.stat().st_size
    rounds = _rounds(samples)
    time.sleep(seconds)
    passed, used = time.monotonic() - began, _cpu_seconds(pid) - cpu
    rounds_taken = _rounds(samples) - rounds
    done.set()
    writer.join()
    return {
        "core_percent": 100 * used / passed,
        "round_ms": 1000 * used / rounds_taken,
        "rounds": rounds_taken,
        "start_ms": 1000 * cpu,
        "memory_mib": _resident_mib(pid),
        "bytes_a_round": (samples.stat().st_size - size) / rounds_taken,
    }


def _write_files(run: Path, done: threading.Event) -> None:
    """Be a run: a logged step, a state and a mirror's status, ten times a second."""
    metrics = JsonLines(run / "logs" / "training_metrics.jsonl")
    step = 0
    while not done.wait(0.1):
        step += 1
        metrics.write({"kind": "step", "step": step, "loss": 3.0, "cost_left_usd": 1.0})
        write_state(run / "state.json", {"status": "training", "step": step, "cost_usd": 1.0})
        status = {"waiting": [step], "last_error": None, "heartbeat": time.time()}
        write_state(run / "mirror.json", status)


def step_cost(run: Path, pid: int, *, pairs: int, steps: int) -> list[Record]:
    """Return the milliseconds of a step with and without being watched, by pair of blocks."""
    world = alone()
    logging.disable(logging.CRITICAL)
    engine = _engine(world)
    reporter, throughput = _reporter(run, engine, world, steps=steps)
    take = _steps(engine, world)

    def block(*, watched: bool) -> dict[str, float]:
        os.kill(pid, signal.SIGCONT if watched else signal.SIGSTOP)
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            loss = take()
            throughput.lap("step")
        if watched:
            reporter.step(TrainState(step=steps, tokens=1), loss, 0.0)
        per_step = 1000 / steps
        return {
            "CPU time": per_step * (time.process_time() - cpu),
            "wall time": per_step * (time.perf_counter() - wall),
        }

    block(watched=True)
    found = []
    for pair in range(pairs):
        first = pair % 2 == 0  # which of the two comes first changes, as the machine does
        one, other = block(watched=first), block(watched=not first)
        on, off = (one, other) if first else (other, one)
        found.append(
            {
                kind: {"off_ms": off[kind], "on_ms": on[kind], "ratio": on[kind] / off[kind]}
                for kind in on
            }
        )
    os.kill(pid, signal.SIGCONT)
    return found


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


def _reporter(
    run: Path, engine: Engine, world: World, *, steps: int
) -> tuple[Reporter, Throughput]:
    throughput = Throughput(time.monotonic)
    figures = RunFigures(
        name="watched",
        total_steps=10**6,
        plan=BatchPlan(SETUP.micro, SETUP.accumulation, 1, SETUP.length),
        optimizer=OPTIMIZER,
        schedule=ScheduleConfig(),
        cadence=Cadence(log=steps, validation=1000, checkpoint=1000),
        mfu=lambda speed: None,
        per_hour_usd=24.0,
    )
    reporter = Reporter(
        run,
        figures=figures,
        engine=engine,
        throughput=throughput,
        time_book=TimeBook(throughput, step_phases("cpu")),
        world=world,
    )
    return reporter, throughput


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process's main thread, to the nanosecond (proc's schedstat)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def _rounds(samples: Path) -> int:
    """Return how often everything was sampled: there is one line of the machine a round."""
    lines = samples.read_text().splitlines()
    return sum(json.loads(line)["kind"] == "system" for line in lines)


if __name__ == "__main__":
    main()
