"""Saving changes nothing, however often, and a resume goes on over the borders of the data."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import train
from ranks import metrics
from tiny import tiny_run

pytestmark = pytest.mark.slow
SETTINGS = [
    "--config",
    "tiny.yaml",
    "batch.micro=8",
    "batch.accumulation=4",  # 334 windows of an epoch: its border lies within step 11
    "checkpoint.mirror=null",
    "checkpoint.keep=30",
    "evaluation.interval=7",
]
EVERY_STEP = [*SETTINGS, "checkpoint.interval=1"]
BORDER = 11


def losses(folder: Path, runs: str) -> dict[str, dict[int, str]]:
    fields = {"step": "loss", "validation": "validation_loss"}
    return {
        kind: {
            step: float(str(record[field])).hex()
            for step, record in metrics(folder / runs / "tiny", kind).items()
        }
        for kind, field in fields.items()
    }


def test_save_never_save_always_and_resume_twice_at_an_epochs_border(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    saveless = ["checkpoint.interval=0", "checkpoint.save_best=false", "run.directory=never"]
    never = train(tmp_path, *SETTINGS, *saveless)
    assert never.codes == [0], never.everything
    wanted = losses(tmp_path, "never")
    assert sorted(wanted["step"]) == list(range(1, 21))
    assert sorted(wanted["validation"]) == [7, 14, 20]

    always = train(tmp_path, *EVERY_STEP)
    assert always.codes == [0], always.everything
    assert losses(tmp_path, "runs") == wanted
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    assert len(list(checkpoints.glob("checkpoint_step_*"))) == 20

    for step in (BORDER - 1, BORDER):  # before it; then after it, from a step that was resumed
        resumed = train(tmp_path, *EVERY_STEP, "--resume", str(step))
        assert resumed.codes == [0], resumed.everything
        assert f"resume   step {step} " in resumed.out[0]
        assert losses(tmp_path, "runs") == wanted
