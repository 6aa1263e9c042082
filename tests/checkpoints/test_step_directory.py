from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints.step_samples import make_step

from refocused.checkpoints.step.branches import step_paths
from refocused.checkpoints.step.step_directory import name_of, parse_name, rank_file, read_step
from refocused.system.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint_step_50000", 50000),
        ("checkpoint-epoch0-step10000-files2", 10000),
        ("final_checkpoint_step_100", 100),
        ("rolling_step_010000", 10000),
        ("checkpoint_step_0", 0),
        ("checkpoint-step1250", None),
        ("checkpoint_step_5x", None),
        (".tmp-checkpoint_step_5-ab", None),
        ("checkpoint_step_-5", None),
    ],
)
def test_both_forms_of_a_name_are_read_and_no_other(name: str, step: int | None) -> None:
    assert parse_name(name) == step


def test_a_name_is_read_back() -> None:
    assert parse_name(name_of(123)) == 123


def test_steps_are_in_numeric_order_and_nothing_else_is_listed(tmp_path: Path) -> None:
    for step in (10000, 9500, 20):
        make_step(tmp_path, step)
    (tmp_path / ".tmp-checkpoint_step_7-ab").mkdir()
    (tmp_path / "checkpoint_step_007").mkdir()
    (tmp_path / "checkpoint_step_8").write_text("a file")
    assert [path.name for path in step_paths(tmp_path).values()] == [
        "checkpoint_step_20",
        "checkpoint_step_9500",
        "checkpoint_step_10000",
    ]
    assert step_paths(tmp_path / "none") == {}


def test_a_step_is_read_with_the_paths_of_its_parts(tmp_path: Path) -> None:
    make_step(tmp_path, 20)
    step = read_step(tmp_path / "checkpoint_step_20")
    assert step.step == 20
    parts = [
        step.trainer,
        step.run,
        step.model,
        *(step.path / rank_file(rank) for rank in range(2)),
    ]
    assert all(part.is_file() for part in parts)
    assert len(list((step.path / "zero").iterdir())) == 2


def test_a_copied_directory_of_another_name_is_read(tmp_path: Path) -> None:
    path = make_step(tmp_path, 20).path.rename(tmp_path / "kept")
    assert read_step(path).step == 20


def test_a_directory_named_after_another_step_is_refused(tmp_path: Path) -> None:
    path = make_step(tmp_path, 20).path.rename(tmp_path / "checkpoint_step_30")
    with pytest.raises(CheckpointError, match="is of step 20, not of the step"):
        read_step(path)


def test_a_missing_manifest_and_a_missing_directory_are_told_apart(tmp_path: Path) -> None:
    path = make_step(tmp_path, 20).path
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        read_step(path)
    with pytest.raises(CheckpointError, match="checkpoint_step_30 is not a directory"):
        read_step(tmp_path / "checkpoint_step_30")


def test_an_emptied_manifest_is_told(tmp_path: Path) -> None:
    path = make_step(tmp_path, 20).path
    (path / "manifest.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"manifest\.json has CRC-32C 00000000"):
        read_step(path)
    (path / "COMMITTED").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is not whole JSON \(0 bytes"):
        read_step(path)
