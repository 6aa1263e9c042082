from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from forked import ForkedRanks, train
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import tiny_run
from wandb_files import offline_sessions

pytestmark = pytest.mark.slow

NOBODY = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
TRACKED = (
    "checkpoint.interval=12",
    "tracking.wandb=demo",
    "tracking.tensorboard=true",
    "tracking.histogram_interval=4",
    "tracking.openmetrics=prometheus/tiny.prom",
)


def test_a_killed_run_goes_on_in_every_tracker_and_tells_no_step_twice(tmp_path: Path) -> None:
    file, run = tiny_run(tmp_path), tmp_path / "runs" / "tiny"
    (tmp_path / "prometheus").mkdir()
    arguments = ("--config", str(file), *TRACKED)
    killed = ForkedRanks(1, [*arguments, "run.steps=1000"], folder=tmp_path, environment=NOBODY)
    try:
        wait_until_told(run / "wandb" / "refocused.json", step=13)
    finally:
        killed.kill()
    told = told_step(run / "wandb" / "refocused.json")
    saved = max(int(path.name[16:]) for path in run.glob("checkpoints/checkpoint_step_*"))
    steps = max(told, saved) + 5
    ended = train(tmp_path, *arguments, f"run.steps={steps}", environment=NOBODY)
    assert ended.codes == [0], ended.err

    first, second = offline_sessions(run)
    assert first.id == second.id
    assert first.project == "demo"
    assert second.config["run"]["steps"] == steps
    assert first.steps[:told] == list(range(1, told + 1))  # and a few that may have been lost
    assert second.steps == list(range(max(told, saved) + 1, steps + 1))
    found = EventAccumulator(
        str(run / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0}
    )
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == list(range(1, steps + 1))
    recorded = {}
    for line in (run / "logs" / "training_metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step" and record["step"] <= steps:  # the killed one may have more
            recorded[record["step"]] = record["loss"]
    shown = {event.step: event.value for event in found.Scalars("train/loss")}
    assert shown == pytest.approx(recorded)
    described = list(range(4, steps + 1, 4))
    for group in ("weights/", "gradients/"):
        tags = [tag for tag in found.Tags()["histograms"] if tag.startswith(group)]
        assert len(tags) > 20
        assert [event.step for event in found.Histograms(tags[0])] == described
    figures = {
        sample.name: sample.value
        for family in text_string_to_metric_families(
            (tmp_path / "prometheus" / "tiny.prom").read_text()
        )
        for sample in family.samples
    }
    assert figures["refocused_train_step"] == steps
    assert figures["refocused_training"] == 0


def wait_until_told(note: Path, *, step: int) -> None:
    """Wait until what W&B was told up to a step is safe."""
    deadline = time.monotonic() + 120
    while told_step(note) < step:
        assert time.monotonic() < deadline, "W&B was not told in time"
        time.sleep(0.05)


def told_step(note: Path) -> int:
    """Return the last step of which W&B's copy outlives a kill; 0: none yet."""
    told: int = json.loads(note.read_text())["last"] if note.exists() else 0
    return max(told, 0)
