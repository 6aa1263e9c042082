from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints.step_samples import commit, fill, make_step, manifest_for

from refocused.checkpoints.step.branches import step_paths
from refocused.checkpoints.step.staging import Staging, clean_leftovers, leftovers, remove_step
from refocused.checkpoints.step.step_directory import read_step
from refocused.checkpoints.step.verify import verify
from refocused.system.errors import CheckpointError
from refocused.system.locks import FileLock


def test_a_step_is_invisible_until_it_is_committed(tmp_path: Path) -> None:
    staging = Staging(tmp_path, name="checkpoint_step_5", token="ab")
    staging.create()
    fill(staging.path, seed=5)
    assert step_paths(tmp_path) == {}
    step = commit(staging, manifest_for(staging.path, 5))
    assert step == read_step(tmp_path / "checkpoint_step_5")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_step_5"]


def test_an_existing_step_is_never_rewritten(tmp_path: Path) -> None:
    old = make_step(tmp_path, 5)
    with pytest.raises(CheckpointError, match="exists already"):
        make_step(tmp_path, 5, seed=99, token="other")
    assert verify(old, deep=True) == []


def test_a_save_that_lacks_a_file_is_not_committed(tmp_path: Path) -> None:
    staging = Staging(tmp_path, name="checkpoint_step_5", token="ab")
    staging.create()
    fill(staging.path, seed=5)
    manifest = manifest_for(staging.path, 5)
    (staging.path / "ranks/rank_00001.pt").unlink()
    with pytest.raises(CheckpointError, match=r"Step 5 was not saved whole: ranks/rank_00001\.pt"):
        commit(staging, manifest)
    assert step_paths(tmp_path) == {}


def test_a_save_that_one_rank_took_no_part_in_is_not_committed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"ranks/rank_00002\.pt is not in the manifest"):
        make_step(tmp_path, 5, world_size=3)


def test_a_discarded_save_leaves_nothing(tmp_path: Path) -> None:
    staging = Staging(tmp_path, name="checkpoint_step_5", token="ab")
    staging.create()
    staging.discard()
    staging.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_removed_step_is_gone(tmp_path: Path) -> None:
    remove_step(make_step(tmp_path, 5).path)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_removed_but_for_those_of_a_download_that_goes_on(tmp_path: Path) -> None:
    save, download, removal = (
        tmp_path / name
        for name in (".tmp-checkpoint_step_1-a", ".tmp-checkpoint_step_2-fetch", ".del-x")
    )
    for folder in (save, download, removal):
        (folder / "zero").mkdir(parents=True)
    step = make_step(tmp_path, 3).path
    assert leftovers(tmp_path) == [removal, save, download]
    lock = FileLock(tmp_path / ".fetch.lock")
    assert lock.acquire()
    assert clean_leftovers(tmp_path) == [removal, save]
    lock.release()
    assert clean_leftovers(tmp_path) == [download]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [step]
