"""`checkpoint.async` in a real run of two ranks: the steps are those of a run that waits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from forked import train
from tiny import tiny_run

from refocused.checkpoints.step.step_directory import read_step
from refocused.checkpoints.step.verify import verify

pytestmark = pytest.mark.slow


def test_the_same_steps_are_saved_byte_for_byte(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    settings = ["--config", "tiny.yaml", "checkpoint.interval=4", "run.steps=12"]
    settings += ["evaluation.interval=0", "checkpoint.mirror=null", "zero.stage=2"]
    steps = {}
    for way in ("false", "true"):
        ended = train(tmp_path, *settings, f"checkpoint.async={way}", ranks=2)
        assert ended.codes == [0, 0], ended.everything
        run = tmp_path / "runs" / "tiny"
        found = [read_step(run / "checkpoints" / f"checkpoint_step_{n}") for n in (4, 8, 12)]
        assert [verify(step, deep=True) for step in found] == [[], [], []]
        steps[way] = [
            {name: one for name, one in step.manifest.files.items() if name.endswith(".pt")}
            for step in found
        ]
        if way == "true":
            assert ended.out[0].count(", stall ") == 3
            lines = (run / "logs" / "performance_metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            saves = [record["step"] for record in records if record["kind"] == "save"]
            assert saves == [4, 8, 12]
        shutil.rmtree(run)
    assert len(steps["true"][0]) == 5  # rank 0 alone writes the weights
    assert steps["true"] == steps["false"]
