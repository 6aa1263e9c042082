"""Compare a run with everything on with a bare DeepSpeed loop, step by step in turns.

    .venv/bin/python benchmarks/step_whole.py [--setup 512] [--stage 1] [--steps 100]

The run logs, writes TensorBoard and OpenMetrics files, samples the machine, saves and mirrors;
after each pass of its loop the bare loop makes a step. Compared is the CPU time of this process,
all its threads together: `median` is that of the pairs' ratios, `mean` the ratio of the sums, in
which saves are (every 50 steps here, every 1,000 by default). What the run's other processes take,
the sampler and the mirror, stands in the last column.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from measuring import CLOCK_TICKS, Column, Record, medians, parser_of, table, write_report
from step_contenders import OPTIMIZER, Clock, Setup, Step, alone, bare_deepspeed

from refocused.system.world import World

FIRST_PASSES = 5  # not counted: torch and DeepSpeed allocate
SAVE_INTERVAL = 50
# `narrow` is so small that only the host's work counts.
SETUPS = {
    "narrow": Setup(24, 64, 512, length=16, micro_batch_size=1, gradient_accumulation_steps=4),
    "512": Setup(4, 256, 2048, length=512, micro_batch_size=1, gradient_accumulation_steps=2),
    "2048": Setup(4, 256, 2048, length=2048, micro_batch_size=1, gradient_accumulation_steps=1),
}
COLUMNS = (
    Column("deepspeed", "DeepSpeed, ms", "{:,.1f}"),
    Column("run", "the run, ms", "{:,.1f}"),
    Column("ratio", "median", "{:.3f}"),
    Column("mean_ratio", "mean", "{:.3f}"),
    Column("helpers_ms", "helpers, ms a step", "{:,.2f}"),
)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--setup", default="512", choices=list(SETUPS))
    parser.add_argument("--stage", type=int, default=1, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=100)
    chosen = parser.parse_args()
    setup, world = SETUPS[chosen.setup], alone()
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(bare_deepspeed(setup, chosen.stage, world), Path(folder))
        train_whole(setup, chosen.stage, Path(folder), world, steps=chosen.steps, turns=turns)
    title = f"{setup.name}, ZeRO-{chosen.stage}"
    rows = {title: turns.compared()}
    print(table(rows, COLUMNS, title=f"CPU time of a step, {len(turns.records)} pairs"))
    write_report(chosen, {title: turns.records, "rows": rows})


class Turns:
    """Measures each pass of a run's loop, and the bare loop's step after it."""

    def __init__(self, bare: Step, folder: Path) -> None:
        """Take the bare loop, and the folder that identifies the run's other processes."""
        self.records: list[Record] = []
        self._bare, self._folder = bare, folder
        self._clock, self._passes = Clock(), 0
        self._helpers_before_ms = self._helpers_ms = 0.0

    def before(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        """Return the first call of a pass of the loop, which ends the previous pass."""

        def end_and_fetch(*args: Any) -> Any:
            run_ms = self._clock.end() if self._passes else 0.0
            self._helpers_ms = cpu_of_others_ms(self._folder)
            bare_ms = self._clock.timed_ms(self._bare)
            if self._passes > FIRST_PASSES:
                self.records.append({"run": run_ms, "deepspeed": bare_ms})
            else:
                self._helpers_before_ms = self._helpers_ms
            self._passes += 1
            self._clock.begin()
            return fetch(*args)

        return end_and_fetch

    def compared(self) -> Record:
        """Return the medians, and the ratio of all passes together."""
        run, bare = (sum(one[name] for one in self.records) for name in ("run", "deepspeed"))
        ratios = [{"ratio": one["run"] / one["deepspeed"]} for one in self.records]
        helpers = (self._helpers_ms - self._helpers_before_ms) / len(self.records)
        return {
            **medians(self.records),
            **medians(ratios),
            "mean_ratio": run / bare,
            "helpers_ms": helpers,
        }


def train_whole(
    setup: Setup, stage: int, folder: Path, world: World, *, steps: int, turns: Turns
) -> None:
    """Train as the command does, in this process."""
    from refocused.config.load_run import load_run
    from refocused.train.lifecycle.session import begin_session
    from refocused.train.lifecycle.trainer import Request, run
    from refocused.train.step import loop
    from refocused.train.step.guards import fetch_together

    _write_tokens(
        folder / "tokens",
        setup,
        sequences=2 * steps * setup.micro_batch_size * setup.gradient_accumulation_steps,
    )
    loaded = load_run(_run_file(setup, stage, folder, steps=steps))
    request = Request(resume="none", dry_run=False, command="step_whole.py")
    with mock.patch.object(loop, "fetch_together", turns.before(fetch_together)):
        run(loaded, request, world, begin_session(0))


def _run_file(setup: Setup, stage: int, folder: Path, *, steps: int) -> Path:
    """Write a run file with everything on, and more frequent saves than by default."""
    shape = folder / "shape.json"
    shape.write_text(json.dumps(dict(setup.shape())))
    settings = {
        "run": {"name": "whole", "steps": steps, "directory": str(folder / "runs")},
        "model": {
            "preset": str(shape),
            "sequence_length": setup.length,
            "dropout": 0.0,
            "head_chunk_tokens": setup.chunk_tokens,
        },
        "batch": {
            "micro_batch_size": setup.micro_batch_size,
            "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        },
        "data": {"source": str(folder / "tokens"), "cache": str(folder / "cache")},
        "optimizer": {"lr": OPTIMIZER.lr},
        "precision": {"dtype": setup.precision.dtype},
        "zero": {"stage": stage},
        "checkpoint": {
            "interval": SAVE_INTERVAL,
            "mirror": str(folder / "mirror"),
            "export_final": False,
        },
        "tracking": {"tensorboard": True, "openmetrics": str(folder / "run.prom")},
    }
    file = folder / "whole.yaml"
    file.write_text(json.dumps(settings))  # JSON is YAML
    return file


def _write_tokens(folder: Path, setup: Setup, *, sequences: int) -> None:
    folder.mkdir()
    draw = np.random.default_rng(0)
    ids = draw.integers(0, setup.vocabulary, sequences * (setup.length + 1), dtype=np.uint16)
    for number, part in enumerate(np.array_split(ids, 4)):
        np.save(folder / f"shard_{number}.npy", part)


def cpu_of_others_ms(folder: Path) -> float:
    """Return the CPU time in ms of other processes with a folder in their command line."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):  # it has ended
            if str(folder).encode() in (process / "cmdline").read_bytes():
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks * 1000 / CLOCK_TICKS


if __name__ == "__main__":
    main()
