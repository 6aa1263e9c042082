from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints.step_samples import fill, make_step, manifest_for

from refocused.checkpoints.staging import Staging, clean_leftovers, leftovers, remove_step
from refocused.checkpoints.step_directory import read_step, step_paths
from refocused.checkpoints.verify import verify
from refocused.errors import CheckpointError

# Commits steps 1, 2, 3, ... and removes all but the newest two, until it is killed.
SAVE_FOREVER = """
import itertools, pathlib, sys
sys.path.insert(0, sys.argv[2])
from checkpoints.step_samples import make_step
from refocused.checkpoints.staging import remove_step
from refocused.checkpoints.step_directory import step_paths
folder = pathlib.Path(sys.argv[1])
first = max((int(p.name.rpartition("_")[2]) for p in step_paths(folder)), default=0) + 1
print("ready", flush=True)
for step in itertools.count(first):
    make_step(folder, step, size=20_000, token=f"{first}-{step}")
    for path in step_paths(folder)[:-2]:
        remove_step(path)
"""


def test_a_step_is_invisible_until_it_is_committed(tmp_path: Path) -> None:
    staging = Staging(tmp_path, step=5, token="ab")
    staging.create()
    fill(staging.path, seed=5)
    assert step_paths(tmp_path) == []
    step = staging.commit(manifest_for(staging.path, 5))
    assert step == read_step(tmp_path / "checkpoint_step_5")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_step_5"]


def test_an_existing_step_is_never_rewritten(tmp_path: Path) -> None:
    old = make_step(tmp_path, 5)
    with pytest.raises(CheckpointError, match="exists already"):
        make_step(tmp_path, 5, seed=99, token="other")
    assert verify(old, deep=True) == []


def test_a_save_that_lacks_a_file_is_not_committed(tmp_path: Path) -> None:
    staging = Staging(tmp_path, step=5, token="ab")
    staging.create()
    fill(staging.path, seed=5)
    manifest = manifest_for(staging.path, 5)
    (staging.path / "ranks/rank_00001.pt").unlink()
    with pytest.raises(CheckpointError, match=r"Step 5 was not saved whole: ranks/rank_00001\.pt"):
        staging.commit(manifest)
    assert step_paths(tmp_path) == []


def test_a_save_that_one_rank_took_no_part_in_is_not_committed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"ranks/rank_00002\.pt is not in the manifest"):
        make_step(tmp_path, 5, world_size=3)


def test_a_discarded_save_leaves_nothing(tmp_path: Path) -> None:
    staging = Staging(tmp_path, step=5, token="ab")
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


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_no_visible_broken_step(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    generator = random.Random(0)
    newest = 0
    interrupted = 0
    for _ in range(30):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path), tests], stdout=subprocess.PIPE
        ) as saver:
            assert saver.stdout is not None
            assert saver.stdout.readline() == b"ready\n"
            time.sleep(generator.uniform(0.0, 0.12))
            saver.kill()
        steps = [read_step(path) for path in step_paths(tmp_path)]
        assert [verify(step, deep=True) for step in steps] == [[]] * len(steps)
        assert newest <= max((step.step for step in steps), default=0)
        newest = max((step.step for step in steps), default=0)
        interrupted += len(leftovers(tmp_path))
        clean_leftovers(tmp_path, older_than_s=-1, now=time.time())
    assert newest > 0
    assert interrupted > 0  # otherwise the kills hit nothing
