"""Interrupted and resumed equals uninterrupted, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ForkedRanks, metrics, train
from tiny import losses, same, tiny_run, wait_for_the_mirror

from refocused.checkpoints.step.checkpoint_directory import saved_steps

pytestmark = pytest.mark.slow
STEPS, INTERVAL = 24, 6


def state_of(run: Path, step: int) -> list[Any]:
    """Every rank's optimizer file: float32 masters, moments, steps."""
    files = sorted((run / "checkpoints" / f"checkpoint_step_{step}" / "zero").glob("*optim*.pt"))
    return [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_killed_and_resumed_equals_uninterrupted_here_and_from_the_mirror(
    tmp_path: Path, dtype: str
) -> None:
    tiny_run(tmp_path)
    settings = [
        *("--config", "tiny.yaml", f"precision.dtype={dtype}"),
        *(f"run.steps={STEPS}", f"checkpoint.interval={INTERVAL}"),
    ]
    mirror_a = ("run.directory=straight", "checkpoint.mirror=mirror_a")
    train(tmp_path, *settings, *mirror_a, ranks=2)
    wanted = losses(tmp_path / "straight" / "tiny")
    assert sorted(wanted) == list(range(1, STEPS + 1))

    broken = tmp_path / "runs" / "tiny"
    settings.append("checkpoint.async=true")  # background saves are equal
    ranks = ForkedRanks(2, settings, folder=tmp_path)
    ranks.wait_until(lambda: 2 * INTERVAL in saved_steps(broken / "checkpoints"))
    ranks.kill()
    ranks.wait(60)
    saved = max(saved_steps(broken / "checkpoints"))
    assert 10 <= saved < STEPS  # checkpoint_step_6 sorts after it
    wait_for_the_mirror(broken)
    shutil.copytree(tmp_path / "mirror", tmp_path / "mirror_b")

    resumed = train(tmp_path, *settings, ranks=2)
    assert f"resume   step {saved} " in resumed.out[0]
    mirror_b = ("run.directory=elsewhere", "checkpoint.mirror=mirror_b")
    from_mirror = train(tmp_path, *settings, *mirror_b, ranks=2)
    assert f"Downloading checkpoint_step_{saved} " in from_mirror.out[0]

    final = state_of(tmp_path / "straight" / "tiny", STEPS)
    assert len(final) == 2
    after = range(saved + 1, STEPS + 1)
    for run in (broken, tmp_path / "elsewhere" / "tiny"):
        found = losses(run)
        assert [found[step] for step in after] == [wanted[step] for step in after]
        assert same(state_of(run, STEPS), final)
    other = state_of(tmp_path / "straight" / "tiny", INTERVAL)
    assert not same(other, final)  # the comparison can tell two states apart


def test_a_finished_run_takes_no_step_unless_extended(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    train(tmp_path, "--config", "tiny.yaml", "--max-steps", "6", ranks=2)
    again = train(tmp_path, "--config", "tiny.yaml", "--max-steps", "6", ranks=2)
    assert "resume   step 6" in again.out[0]
    assert "loss" not in again.out[0].partition("resume")[2].partition("best")[0]
    train(tmp_path, "--config", "tiny.yaml", "--max-steps", "8", ranks=2)
    assert sorted(metrics(tmp_path / "runs" / "tiny")) == list(range(1, 9))
