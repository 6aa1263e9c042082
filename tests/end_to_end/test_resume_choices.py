"""Choosing a checkpoint to resume: suggestions, changes, corruption."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from ranks import ForkedRanks, metrics, train
from tiny import damage, log_lines, tiny_run, wait_for_the_mirror

from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.checkpoint_directory import checkpoint_paths, read_checkpoint
from refocused.checkpoints.step.verify import verify
from refocused.config.load_run import load_run
from refocused.estimate.memory_plan import cpu_bf16_gain, native_dtype
from refocused.metrics.jsonl import read_json
from refocused.metrics.run_time import RunTimeReader
from refocused.system.hardware import cpu_flags

pytestmark = pytest.mark.slow
UNMIRRORED = ["--config", "tiny.yaml", "checkpoint.mirror=null"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps with two checkpoints, to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    tiny_run(folder)
    train(folder, *UNMIRRORED, ranks=2)
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "copy")


def test_a_checkpoint_continues_with_allowed_data_of_higher_loss(copied: Path) -> None:
    """Tokens that cannot be predicted: the loss is that of an untrained model."""
    train(copied, *UNMIRRORED, "run.steps=80", ranks=1)
    for number in range(4):
        ids = np.random.default_rng(number).integers(0, 512, 4000).astype(np.uint16)
        np.save(copied / "tokens" / f"shard_{number:03d}.npy", ids)
    ended = train(copied, *UNMIRRORED, "run.steps=84", "--allow-change", "data", ranks=2)
    assert "resume   step 80" in ended.out[0]
    losses = {
        step: float(str(record["loss"]))
        for step, record in metrics(copied / "runs" / "tiny").items()
    }
    assert losses[81] > losses[80] + 1


def test_a_finished_run_started_again_says_so_and_takes_no_time(copied: Path) -> None:
    run = copied / "runs" / "tiny"
    before, state = RunTimeReader(run).read(), read_json(run / "state.json") or {}
    again = train(copied, *UNMIRRORED, ranks=1)
    assert again.out[0].count("finished all 20 steps were made before") == 1
    assert RunTimeReader(run).read() == before
    assert (read_json(run / "state.json") or {})["seconds"] == state["seconds"]
    longer = train(copied, *UNMIRRORED, "run.steps=21", ranks=1)
    assert "were made before" not in longer.out[0]
    assert RunTimeReader(run).read().sessions == before.sessions + 1


@pytest.mark.parametrize("request_", ["best", "latest", "20"])
def test_a_mistyped_run_to_resume_gets_no_folder(copied: Path, request_: str) -> None:
    typed = [*UNMIRRORED, "--resume", request_, "--run", "nothere"]
    ended = ForkedRanks(1, typed, folder=copied).wait(100)
    assert ended.codes == [1] and "heckpoint" in ended.err[0], ended.everything
    assert [path.name for path in (copied / "runs").iterdir()] == ["tiny"]


def test_auto_keeps_the_precision_of_the_checkpoint(copied: Path) -> None:
    """The checkpoint has a precision that `auto` would not choose here."""
    native = native_dtype(capability=None, cpu_flags=cpu_flags(), cpu_gain=cpu_bf16_gain).dtype
    other = "bf16" if native == "fp32" else "fp32"
    changed = (f"precision.dtype={other}", "--allow-change", "precision.dtype", "run.steps=21")
    train(copied, *UNMIRRORED, *changed, ranks=2)
    ended = train(copied, *UNMIRRORED, "precision.dtype=auto", "run.steps=22", ranks=2)
    assert f"  dtype    {native} (precision.dtype=auto)" in ended.out[0]
    assert f"  dtype    {other}, as checkpoint_step_21 was saved" in ended.out[0]
    run = copied / "runs" / "tiny"
    assert load_run(run / "run.yaml").config.precision.dtype == other
    assert read_checkpoint(run / "checkpoints" / "checkpoint_step_22").manifest.dtype == other


def test_a_corrupt_newest_checkpoint_is_set_aside_with_a_warning(copied: Path) -> None:
    before = metrics(copied / "runs" / "tiny")
    damage(copied, 20)
    ended = train(copied, *UNMIRRORED, ranks=2)
    assert "warning: runs/tiny/checkpoints/checkpoint_step_20 is corrupt" in ended.err[0]
    assert "resume   step 10" in ended.out[0]
    again = metrics(copied / "runs" / "tiny")
    assert [again[step]["loss"] for step in again] == [before[step]["loss"] for step in before]
    assert again[11]["time"] != before[11]["time"]
    checkpoints = copied / "runs" / "tiny" / "checkpoints"
    assert len(list(checkpoints.glob(".bad-checkpoint_step_20-*"))) == 1
    train(copied, *UNMIRRORED, "--resume", "20", ranks=2)  # it was saved again


def test_a_bad_shard_is_skipped_and_the_run_continues(copied: Path) -> None:
    skip = 'data.skip=["shard_000.npy"]'
    ended = train(copied, *UNMIRRORED, skip, "run.steps=24", ranks=2)
    assert "resume   step 20" in ended.out[0]
    assert 'differs  data.skip [] -> ["shard_000.npy"]' in ended.out[0]
    assert "data.skip leaves out 1 of 3 shards" in ended.out[0]
    checkpoints = copied / "runs" / "tiny" / "checkpoints"
    sequences = [
        json.loads((checkpoints / f"checkpoint_step_{step}" / "trainer.json").read_text())[
            "position"
        ]["sequences"]
        for step in (20, 24)
    ]
    assert sequences[0] == 20 * 8  # 2 ranks, micro-batches of 2, accumulated twice
    assert (
        sequences[0] + 4 * 8 < sequences[1] < sequences[0] + 4 * 8 * 3
    )  # skipped ones are counted


@pytest.mark.parametrize("request_", ["none", "runs/tiny/checkpoints/checkpoint_step_10"])
def test_resuming_an_earlier_step_keeps_the_later_ones(copied: Path, request_: str) -> None:
    ended = train(copied, *UNMIRRORED, "--resume", request_, "run.steps=20", ranks=2)
    start = 0 if request_ == "none" else 10
    assert f"branch   2 of this run begins at step {start}" in ended.out[0]
    checkpoints = copied / "runs" / "tiny" / "checkpoints"
    first = ["checkpoint_step_10", "checkpoint_step_20"]
    second = ["branch-2/checkpoint_step_10"] if request_ == "none" else []
    assert list(checkpoint_paths(checkpoints)) == [*first, *second, "branch-2/checkpoint_step_20"]
    again = train(copied, *UNMIRRORED, "run.steps=20", ranks=2)  # on the same branch
    assert "resume   step 20 (runs/tiny/checkpoints/branch-2/" in again.out[0]


def test_a_new_branch_is_not_mixed_with_the_mirrors_old_one(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    settings = ("--config", "tiny.yaml", "checkpoint.interval=5")
    train(tmp_path, *settings, "run.steps=15", ranks=1)
    train(tmp_path, *settings, "--resume", "5", "run.steps=8", ranks=1)
    wait_for_the_mirror(tmp_path / "runs" / "tiny")
    shutil.rmtree(tmp_path / "runs")
    again = train(tmp_path, *settings, "run.steps=12", ranks=1)
    assert "resume   step 8 " in again.out[0]
    assert list(checkpoint_paths(tmp_path / "mirror" / "tiny" / "checkpoints")) == [
        *(f"checkpoint_step_{step}" for step in (5, 10, 15)),
        *(f"branch-2/checkpoint_step_{step}" for step in (8, 10, 12)),
    ]
    left = train(tmp_path, *settings, "--resume", "15", "run.steps=20", ranks=1)
    assert "branch   3 of this run begins at step 15" in left.out[0]


def test_the_best_is_that_of_the_present_validation_set(tmp_path: Path) -> None:
    """Also after a validation that was made up for a saved step, on the disk as in the mirror."""
    tiny_run(tmp_path)
    run, mirror = tmp_path / "runs" / "tiny", DirectoryBucket(tmp_path / "mirror")
    settings = ("--config", "tiny.yaml", "checkpoint.keep=9", "checkpoint.interval=5")

    def best() -> set[tuple[int, float | None]]:
        there = Catalog(tmp_path / "nothing" / "checkpoints", mirror, "tiny/checkpoints")
        entries = [*Catalog(run / "checkpoints").entries(), *there.entries()]
        return {(one.step, one.validation_loss) for one in entries if "best" in one.notes}

    def validated() -> list[tuple[int, float]]:
        records = (one for one in log_lines(run, "training_metrics") if one["kind"] == "validation")
        return [(one["step"], one["validation_loss"]) for one in records]

    train(tmp_path, *settings, "run.steps=10", "evaluation.interval=4", ranks=1)
    assert best() == {min(validated(), key=lambda one: one[1])}
    late = ("--resume", "5", "run.steps=5", "evaluation.interval=5")
    train(tmp_path, *settings, *late, ranks=1)  # as after a stop
    made_up = read_checkpoint(run / "checkpoints" / "checkpoint_step_5").manifest
    assert validated()[-1] == (5, made_up.validation_loss)

    ended = train(tmp_path, *settings, "run.steps=5", "evaluation.sequences=2", ranks=1)
    assert "the validation set has changed" in ended.out[0]
    assert best() == {validated()[-1]} and len(validated()) == 5
    assert verify(read_checkpoint(run / "checkpoints" / "checkpoint_step_5"), deep=True) == []
    assert not list((run / "checkpoints").rglob("*.py")), "DeepSpeed's converters stay out"
    committed = Path("tiny", "checkpoints", "checkpoint_step_5", "COMMITTED")
    damaged = (tmp_path / "mirror" / committed).read_bytes().replace(b", ", b"0,")
    (tmp_path / "mirror" / committed).write_bytes(damaged)
    assert best() == {validated()[-1], validated()[0]}, "no damaged loss is believed"
