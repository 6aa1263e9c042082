"""Interrupted and resumed equals uninterrupted, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import TRAIN, Ranks, metrics, train
from tiny import tiny_run

pytestmark = pytest.mark.slow


def hex_losses(run: Path) -> dict[int, str]:
    return {step: float(record["loss"]).hex() for step, record in metrics(run).items()}


def state_of(run: Path, step: int) -> list[Any]:
    """Every rank's optimizer file: float32 masters, moments, steps."""
    files = sorted((run / "checkpoints" / f"checkpoint_step_{step}" / "zero").glob("*optim*.pt"))
    return [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) if isinstance(left, int | float | str | bool) else True


def mirrored(run: Path) -> list[int]:
    status = run / "mirror.json"
    return json.loads(status.read_text())["mirrored"] if status.exists() else []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_killed_and_resumed_equals_uninterrupted_here_and_from_the_mirror(
    tmp_path: Path, dtype: str
) -> None:
    file = tiny_run(tmp_path)
    settings = ["--config", str(file), f"precision.dtype={dtype}"]
    straight = train(tmp_path, *settings, "run.directory=straight", "checkpoint.mirror=mirror_a")
    assert straight.codes == [0, 0], straight.everything
    wanted = hex_losses(tmp_path / "straight" / "tiny")
    assert sorted(wanted) == list(range(1, 21))

    broken = tmp_path / "runs" / "tiny"
    ranks = Ranks(2, [str(TRAIN), *settings, "run.steps=20"], folder=tmp_path)
    ranks.wait_until(lambda: max(metrics(broken), default=0) >= 12 and 10 in mirrored(broken))
    ranks.kill()
    ranks.wait()
    shutil.rmtree(broken / "checkpoints" / "checkpoint_step_20", ignore_errors=True)
    shutil.copytree(tmp_path / "mirror", tmp_path / "mirror_b")
    shutil.rmtree(tmp_path / "mirror_b" / "tiny" / "checkpoints" / "checkpoint_step_20", True)

    resumed = train(tmp_path, *settings)
    assert resumed.codes == [0, 0], resumed.everything
    assert "resume   step 10" in resumed.out[0]
    from_mirror = train(
        tmp_path, *settings, "run.directory=elsewhere", "checkpoint.mirror=mirror_b"
    )
    assert from_mirror.codes == [0, 0], from_mirror.everything
    assert "Fetching step 10" in from_mirror.out[0]

    final = state_of(tmp_path / "straight" / "tiny", 20)
    assert len(final) == 2
    for run in (broken, tmp_path / "elsewhere" / "tiny"):
        losses = hex_losses(run)
        assert {step: losses[step] for step in range(11, 21)} == {
            step: wanted[step] for step in range(11, 21)
        }
        assert same(state_of(run, 20), final)
    other = state_of(tmp_path / "straight" / "tiny", 10)
    assert not same(other, final)  # the comparison can tell two states apart


def test_run_again_after_its_end_takes_no_step_and_more_steps_go_on(tmp_path: Path) -> None:
    file = tiny_run(tmp_path)
    first = train(tmp_path, "--config", str(file), "--max-steps", "6")
    assert first.codes == [0, 0], first.everything
    again = train(tmp_path, "--config", str(file), "--max-steps", "6")
    assert again.codes == [0, 0], again.everything
    assert "resume   step 6" in again.out[0]
    assert "loss" not in again.out[0].partition("resume")[2].partition("best")[0]
    more = train(tmp_path, "--config", str(file), "--max-steps", "8")
    assert more.codes == [0, 0], more.everything
    assert sorted(metrics(tmp_path / "runs" / "tiny")) == list(range(1, 9))
