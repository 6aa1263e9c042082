import contextlib
import json
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from ranks import ForkedRanks, train, until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import log_lines, tiny_run
from wandb_files import offline_sessions

pytestmark = pytest.mark.slow

NOBODY = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
TRACKED = (
    "checkpoint.interval=12",
    "log.sample_seconds=0.5",
    "tracking.wandb=demo",
    "tracking.tensorboard=true",
    "tracking.histogram_interval=4",
    "tracking.openmetrics=prometheus/tiny.prom",
)


def test_a_killed_run_continues_in_every_tracker(tmp_path: Path) -> None:
    file, run = tiny_run(tmp_path), tmp_path / "runs" / "tiny"
    (tmp_path / "prometheus").mkdir()
    arguments = ("--config", str(file), *TRACKED)
    with ForkedRanks(
        1, [*arguments, "run.steps=1000"], folder=tmp_path, environment=NOBODY
    ) as killed:
        until(lambda: told_step(run / "wandb" / "refocused.json") >= 13, seconds=120)
        killed.wait_until(lambda: bool(log_lines(run, "gpu_metrics")))
        assert samplers(run) == 1
    until(lambda: not samplers(run))
    assert alarms(run) == [("run_died", True)]
    readings = len(log_lines(run, "gpu_metrics"))
    told = told_step(run / "wandb" / "refocused.json")
    saved = max(int(path.name[16:]) for path in run.glob("checkpoints/checkpoint_step_*"))
    steps = max(told, saved) + 5
    train(tmp_path, *arguments, f"run.steps={steps}", environment=NOBODY)
    until(lambda: not samplers(run))
    assert alarms(run) == [("run_died", True), ("run_died", False)]
    assert len(log_lines(run, "gpu_metrics")) > readings

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
    for record in log_lines(run, "training_metrics"):
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


def told_step(note: Path) -> int:
    """Return the last step in W&B's file, which survives a kill; 0: none yet."""
    told: int = json.loads(note.read_text())["last"] if note.exists() else 0
    return max(told, 0)


def alarms(run: Path) -> list[tuple[str, bool]]:
    return [(line["alarm"], line["raised"]) for line in log_lines(run, "events") if "alarm" in line]


def samplers(run: Path) -> int:
    """Count the processes of this run's sampler."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes()
            found += b"sampler.sampler:sample" in words and str(run).encode() in words
    return found
