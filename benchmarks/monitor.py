"""What watching a run costs: the sampler, the live screen, and training with all of it on.

    python benchmarks/monitor.py [--seconds 20] [--pairs 12] [--steps 40]

The sampler watches eight GPUs of a stand-in for NVIDIA's library (tests/monitor), once a second,
beside a run whose files change ten times a second. Its figures hold the stand-in's own time, and
not that of a driver. The screen shows a run with 10,000 logged steps behind it, one more every ten
seconds, and GPUs that change every second. monitor_steps.py says how training is measured. CPU time
is that of the measured process: on a busy machine wall time says little.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from measuring import ROOT, Column, Record, say, table, write_report
from monitor_screen import cpu_seconds, resident_mib, screen_cost
from monitor_steps import LOG_STEPS, step_cost

from refocused.metrics.jsonl import JsonLines, write_state
from refocused.monitor.sampler.start_sampler import SamplerSettings, start_sampler
from refocused.system.processes import identify

sys.path.insert(0, str(ROOT / "tests" / "monitor"))

GPUS = 8
WARM_SECONDS = 5.0  # of the sampler, for its imports and first readings
MOST_SAMPLER_PERCENT, MOST_SCREEN_PERCENT, MOST_STEP_RATIO = 0.5, 1.0, 1.005
SAMPLER_COLUMNS = (
    Column("core_percent", "% of a core", "{:.3f}"),
    Column("round_ms", "CPU ms a round", "{:.2f}"),
    Column("start_ms", "CPU ms to start", "{:,.0f}"),
    Column("memory_mib", "memory, MiB", "{:,.0f}"),
    Column("bytes_a_round", "bytes a round", "{:,.0f}"),
)
SCREEN_COLUMNS = (
    Column("core_percent", "% of a core", "{:.2f}"),
    Column("start_ms", "CPU ms to start", "{:,.0f}"),
    Column("memory_mib", "memory, MiB", "{:,.0f}"),
    Column("bytes_a_second", "bytes a second", "{:,.0f}"),
)
STEP_COLUMNS = (
    Column("off_ms", "off, ms", "{:,.2f}"),
    Column("on_ms", "on, ms", "{:,.2f}"),
    Column("ratio", "on/off", "{:.4f}"),
    Column("low", "95 % from", "{:.4f}"),
    Column("high", "to", "{:.4f}"),
    Column("spread", "sd of a pair", "{:.4f}"),
)
WATCHING_COLUMNS = (
    Column("telling_us", "training thread, CPU us a step", "{:,.1f}"),
    Column("others_us", "trackers' threads", "{:,.1f}"),
    Column("idle_percent", "idle, % of a core", "{:.3f}"),
    Column("share_percent", "together, % of a step", "{:.3f}"),
)


@dataclasses.dataclass(frozen=True)
class Site:
    """A run that is watched."""

    run: Path  # its folder
    sampler_pid: int  # of the process that samples
    stir: Callable[[], None]  # changes what the GPUs say


def main() -> None:
    """Measure, print the tables, write everything down; fail where it costs too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the sampler, each screen")
    parser.add_argument("--pairs", type=int, default=12, help="of blocks with and without")
    parser.add_argument("--steps", type=int, default=40, help="of a block")
    parser.add_argument("--json", type=Path, default=Path("/tmp/refocused-benchmarks/monitor.json"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, watched_site(Path(folder)) as site:
        say(f"the sampler, {chosen.seconds:.0f} s")
        sampler = sampler_cost(site.run, site.sampler_pid, seconds=chosen.seconds)
        say(f"the screen, {chosen.seconds:.0f} s at each size")
        screens = screen_cost(site.run, site.stir, seconds=chosen.seconds)
        steps = step_cost(site.run, site.sampler_pid, pairs=chosen.pairs, steps=chosen.steps)
    title = f"The sampler at 1 Hz over {GPUS} GPUs"
    print(table({"sampler": sampler}, SAMPLER_COLUMNS, title=title))
    print(table(screens, SCREEN_COLUMNS, title="The live screen, as often as it looks by itself"))
    title = f"A step with everything on ({', '.join(steps['on'])}), reported every {LOG_STEPS}"
    print(table(steps["rows"], STEP_COLUMNS, title=title))
    title = "What watching takes of it, measured by itself"
    print(table({"everything on": steps["watching"]}, WATCHING_COLUMNS, title=title))
    write_report(
        chosen.json,
        settings={"seconds": chosen.seconds, "pairs": chosen.pairs, "steps": chosen.steps},
        results={"sampler": sampler, "screens": screens, "steps": steps},
    )
    print("\n".join(["", *(failures := too_much(sampler, screens, steps)), *untold(steps)]))
    sys.exit(bool(failures))


def too_much(sampler: Record, screens: dict[str, Record], steps: Record) -> list[str]:
    """Return what costs more than it may."""
    cpu, share = steps["rows"]["CPU time"], steps["watching"]["share_percent"]
    found = []
    if sampler["core_percent"] > MOST_SAMPLER_PERCENT:
        found.append(f"TOO MUCH: the sampler takes more than {MOST_SAMPLER_PERCENT} % of a core.")
    for name, one in screens.items():
        if one["core_percent"] > MOST_SCREEN_PERCENT:
            found.append(f"TOO MUCH: the screen at {name} takes over {MOST_SCREEN_PERCENT} %.")
    if cpu["low"] > MOST_STEP_RATIO or share > 100 * (MOST_STEP_RATIO - 1):
        found.append(f"TOO MUCH: a step takes more than {MOST_STEP_RATIO} of one without watching.")
    return found


def untold(steps: Record) -> list[str]:
    """Return what on against off could not tell: more pairs would, or a quieter machine."""
    cpu = steps["rows"]["CPU time"]
    if not cpu["low"] <= MOST_STEP_RATIO < cpu["high"]:
        return []
    return [
        f"NOT TOLD by on/off: its 95 % reach from {cpu['low']:.4f} to {cpu['high']:.4f}, to both "
        f"sides of {MOST_STEP_RATIO}. What watching takes by itself is told by the last table."
    ]


@contextlib.contextmanager
def watched_site(folder: Path) -> Iterator[Site]:
    """Start a sampler over the stand-in's GPUs."""
    from nvml_machine import Machine

    machine = Machine(folder / "nvml", gpus=GPUS)
    os.environ.update(machine.environment)
    run = folder / "run"

    def stir() -> None:
        for index in range(GPUS):
            machine.gpu(
                index,
                utilization=random.randint(90, 100),
                temperature=random.randint(58, 72),
                power=random.randint(600_000, 700_000),
            )

    with subprocess.Popen(["sleep", "86400"]) as rank:  # what the sampler ends with
        identity = identify(rank.pid)
        assert identity is not None
        settings = SamplerSettings(run=run, training=identity, interval_seconds=1.0, ranks=GPUS)
        try:
            yield Site(run, start_sampler(settings), stir)
        finally:
            rank.kill()


def sampler_cost(run: Path, pid: int, *, seconds: float) -> Record:
    """Return what the sampler takes while the run's files change ten times a second."""
    done = threading.Event()
    writer = threading.Thread(target=_write_files, args=(run, done))
    writer.start()
    time.sleep(WARM_SECONDS)
    samples = run / "logs" / "gpu_metrics.jsonl"
    began, cpu, size = time.monotonic(), cpu_seconds(pid), samples.stat().st_size
    rounds = _rounds(samples)
    time.sleep(seconds)
    passed, used = time.monotonic() - began, cpu_seconds(pid) - cpu
    rounds_taken = _rounds(samples) - rounds
    done.set()
    writer.join()
    return {
        "core_percent": 100 * used / passed,
        "round_ms": 1000 * used / rounds_taken,
        "rounds": rounds_taken,
        "start_ms": 1000 * cpu,
        "memory_mib": resident_mib(pid),
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


def _rounds(samples: Path) -> int:
    """Return how often everything was sampled: there is one line of the machine a round."""
    lines = samples.read_text().splitlines()
    return sum(json.loads(line)["kind"] == "system" for line in lines)


if __name__ == "__main__":
    main()
