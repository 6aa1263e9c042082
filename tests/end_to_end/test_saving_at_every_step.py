"""The frequency of saves changes no result, also over the end of an epoch."""

from pathlib import Path

import pytest
from ranks import metrics, train
from tiny import losses, tiny_run

pytestmark = pytest.mark.slow
SETTINGS = [
    "--config",
    "tiny.yaml",
    "batch.micro_batch_size=8",
    "batch.gradient_accumulation_steps=4",  # an epoch of 334 sequences ends within step 11
    "checkpoint.mirror=null",
    "checkpoint.keep=30",
    "evaluation.interval=7",
]
EVERY_STEP = [*SETTINGS, "checkpoint.interval=1"]
BORDER = 11


def measured(run: Path) -> tuple[dict[int, str], dict[int, object]]:
    """Return the losses of training and of validation."""
    validations = metrics(run, "validation")
    return losses(run), {step: one["validation_loss"] for step, one in validations.items()}


def test_saving_never_or_always_and_resuming_twice_change_no_bit(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    saveless = ["checkpoint.interval=0", "checkpoint.save_best=false", "run.directory=never"]
    train(tmp_path, *SETTINGS, *saveless)
    wanted = measured(tmp_path / "never" / "tiny")
    assert [sorted(one) for one in wanted] == [list(range(1, 21)), [7, 14, 20]]

    train(tmp_path, *EVERY_STEP)
    run = tmp_path / "runs" / "tiny"
    assert measured(run) == wanted
    assert len(list((run / "checkpoints").glob("checkpoint_step_*"))) == 20

    for step in (BORDER - 1, BORDER):  # before it, and then after it
        resumed = train(tmp_path, *EVERY_STEP, "--resume", str(step))
        assert f"resume   step {step} " in resumed.out[0]
        assert measured(run) == wanted
