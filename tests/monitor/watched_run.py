"""A run's files, as training and its sampler write them, for the tests of what reads them."""

import dataclasses
import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from refocused.monitor.readings import AlarmEvent, GpuSample, SystemSample, as_record
from refocused.monitor.run_reader import RunReader, RunView
from refocused.monitor.sampler.alarms import Reading

NOW = 1_800_000_000.0
STEP_SECONDS = 1.5
ADVICE = "Restart or replace the machine, and resume the run from its last checkpoint."
GPU = GpuSample(
    host="node1",
    index=0,
    utilization_fraction=0.97,
    memory_used_gb=48.4,
    memory_total_gb=79.6,
    temperature_celsius=66,
    power_watts=640.0,
    power_limit_watts=700.0,
    sm_clock_mhz=1905,
    sm_clock_max_mhz=1980,
    ecc_uncorrected=0,
    nvlinks_active=18,
    nvlinks_total=18,
    throttle_reasons=(),
)
SYSTEM = SystemSample(
    host="node1", gpus=8, cpu_fraction=0.12, memory_used_gb=180, memory_total_gb=1800
)


@dataclasses.dataclass(frozen=True, slots=True)
class WatchedRun:
    """One run's folder, of which the last step was logged ten seconds before `NOW`."""

    folder: Path

    def begin(self, *, step: int = 1000, status: str = "training", **facts: Any) -> None:
        """Write every file of a run that logs each tenth step."""
        self.metrics(range(10, step + 1, 10), last=step)
        self.state(step=step, status=status, **facts)
        (self.folder / "run.yaml").write_text("cost: {per_hour_usd: 36.0, budget_usd: 400.0}\n")
        for saved in (step - 200, step - 100):
            (self.folder / "checkpoints" / f"checkpoint_step_{saved}").mkdir(parents=True)

    def metrics(self, steps: Sequence[int], *, last: int, loss: float = 3.0) -> None:
        for step in steps:
            record: dict[str, Any] = {"kind": "step", "step": step, "loss": loss + 100 / step}
            record |= {"learning_rate": 3e-4, "step_seconds": STEP_SECONDS, "mfu_fraction": 0.46}
            left = (2000 - step) * STEP_SECONDS
            record |= {"tokens_per_second": 700_000.0, "seconds_left": left}
            self.line("training_metrics", NOW - 10 - (last - step) * STEP_SECONDS, record)

    def state(self, *, step: int, status: str, age: float = 10.0, **facts: Any) -> None:
        began = NOW if facts.pop("just_begun", False) else 0.0
        content = {"updated": iso(NOW - age), "run": "one", "status": status, "total_steps": 2000}
        content |= {"step": step, "tokens": step * 1000, "loss": 3.1, "best_loss": 3.05}
        content |= {
            "best_bits_per_byte": 0.95,
            "best_step": 900,
            "seconds": step * STEP_SECONDS,
            "cost_usd": 20.0,
        }
        content |= {"session_began": iso(began), **facts}
        (self.folder / "state.json").write_text(json.dumps(content))

    def mirror(self, **facts: Any) -> None:
        (self.folder / "mirror.json").write_text(json.dumps({"bucket": "gs://b", **facts}))

    def gpus(self, *gpus: GpuSample, age: float = 5.0) -> None:
        for sample in (*gpus, SYSTEM):
            self.line("gpu_metrics", NOW - age, as_record(sample))

    def alarm(self, *, raised: bool = True, critical: bool = True, name: str = "gpu_lost") -> None:
        severity = "critical" if critical else "warning"
        event = AlarmEvent(name, "node1 GPU 7", raised, severity, f"GPU 7: {name}", "node1", ADVICE)
        self.line("events", NOW - 120, as_record(event))

    def line(self, name: str, at: float, record: dict[str, Any]) -> None:
        file = self.folder / "logs" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(json.dumps({"time": iso(at), **record}) + "\n")

    def reader(self) -> RunReader:
        return RunReader(
            self.folder,
            saved_steps=lambda folder: [
                int(path.name.rpartition("_")[2]) for path in folder.glob("*")
            ],
        )

    def view(self, *, after: float = 0.0, alive: bool = True) -> RunView:
        """The run as a new reader finds it so many seconds after `NOW`."""
        view = self.reader().read(NOW + after)
        known = view.state is not None
        liveness: Any = ("alive" if alive else "gone") if known else None
        return dataclasses.replace(view, liveness=liveness)


def iso(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat()


def new_run(folder: Path, name: str = "one") -> WatchedRun:
    run = WatchedRun(folder / name)
    run.folder.mkdir(parents=True)
    return run


def by_alarm(readings: Iterable[Reading], subject: str | None = None) -> dict[str, Reading]:
    """Return the readings of a subject by alarm, at most one each."""
    found = [one for one in readings if subject in (None, one.subject) and one.level]
    named = {one.alarm: one for one in found}
    assert len(named) == len(found)
    return named
