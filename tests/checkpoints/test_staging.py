from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from checkpoints.step_samples import fill, make_step, manifest_for

from refocused.checkpoints.branches import step_paths
from refocused.checkpoints.staging import Staging, clean_leftovers, leftovers, remove_step
from refocused.checkpoints.step_directory import read_step
from refocused.checkpoints.verify import verify
from refocused.errors import CheckpointError


def test_a_step_is_invisible_until_it_is_committed(tmp_path: Path) -> None:
    staging = Staging(tmp_path, name="checkpoint_step_5", token="ab")
    staging.create()
    fill(staging.path, seed=5)
    assert step_paths(tmp_path) == {}
    step = staging.commit(manifest_for(staging.path, 5))
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
        staging.commit(manifest)
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


def test_only_old_leftovers_are_cleaned(tmp_path: Path) -> None:
    now = time.time()
    old, busy, removal = (
        tmp_path / name
        for name in (".tmp-checkpoint_step_1-a", ".tmp-checkpoint_step_2-b", ".del-x")
    )
    for folder in (old, busy, removal):
        (folder / "zero").mkdir(parents=True)
        (folder / "zero" / "part").write_bytes(b"x")
        for path in (folder / "zero" / "part", folder / "zero", folder):
            os.utime(path, (now - 7200, now - 7200))
    os.utime(busy / "zero" / "part", (now, now))  # its own folders look old: a long write
    step = make_step(tmp_path, 3).path
    assert leftovers(tmp_path) == [removal, old, busy]
    assert clean_leftovers(tmp_path, older_than_s=3600, now=now) == [removal, old]
    assert sorted(tmp_path.iterdir()) == [busy, step]
