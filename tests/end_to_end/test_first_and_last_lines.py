"""A dry run, and the end of a run with a non-finite loss."""

import json
from pathlib import Path

import pytest
from ranks import metrics, train
from tiny import tiny_run

from refocused.checkpoints.step.checkpoint_directory import read_checkpoint
from refocused.checkpoints.step.verify import verify

pytestmark = pytest.mark.slow
SETTINGS = ["--config", "tiny.yaml", "checkpoint.mirror=null"]


def test_a_dry_run_checks_everything_and_takes_no_step(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    run = tmp_path / "runs" / "tiny"
    left_to_the_plan = [
        "batch.micro_batch_size=auto",
        "batch.gradient_accumulation_steps=null",
        "batch.global_batch_size=8",
    ]
    left_to_the_plan += ["zero.stage=auto", "zero.offload_optimizer=auto"]
    left_to_the_plan += ["data.validation_fraction=0"]
    tried = train(tmp_path, *SETTINGS, *left_to_the_plan, "--dry-run", ranks=2)
    chosen = ("4 x 32 x 1 accumulation x 2 ranks", "GB activations a rank | ZeRO-1, fp32")
    for said in (
        *chosen,
        "model    gpt2",
        "data     3 shards",
        "CPU threads a rank: 1; freed memory: kept",
        "untrained loss 6.",
        "warning  evaluation.interval is 10: no data are held out, so there is no validation loss",
        "no step taken",
    ):
        assert tried.out[0].count(said) == 1
    assert tried.out[1] + tried.err[1] == ""
    assert not run.parent.exists()
    trained = train(tmp_path, *SETTINGS, "--max_steps", "12", "--profile", "2", ranks=2)
    assert "profile 2 steps" in trained.out[0] and "data wait" in trained.out[0]
    assert (run / "profile" / "steps_11-12.trace.json").exists()
    expected = json.loads((run / "expected_loss.json").read_text())
    assert expected["reason"].startswith("the fits hold for attention, 50 M")
    before = contents(run)
    again = train(tmp_path, *SETTINGS, "--dry-run", ranks=2)
    assert "resume   step 12" in again.out[0] and "held out" not in again.out[0]
    assert contents(run) == before


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_non_finite_loss_stops_the_run_before_the_update(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    run = tmp_path / "runs" / "tiny"
    train(tmp_path, *SETTINGS, "run.steps=10", ranks=2)
    lost = train(tmp_path, *SETTINGS, "optimizer.lr=1e30", ranks=2, code=1)
    assert "Traceback" not in lost.everything and lost.out[1] + lost.err[1] == ""
    message = lost.err[0]
    assert message.count("Loss is not finite on rank 0 at step 12 (shard_00") == 1
    assert "sequence" in message and "Stopped before the optimizer step" in message
    assert "resume with a lower optimizer.lr" in message
    assert sorted(metrics(run)) == list(range(1, 12))
    assert json.loads((run / "state.json").read_text())["status"] == "failed"
    saved = list((run / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["checkpoint_step_10"]
    assert verify(read_checkpoint(saved[0]), deep=True) == []
    train(tmp_path, *SETTINGS, ranks=2)
    assert sorted(metrics(run)) == list(range(1, 21))
