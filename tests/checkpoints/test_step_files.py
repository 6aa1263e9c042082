"""A checkpoint on disk: manifest, creation, verification and removal."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints.step_samples import commit, fill, make_step, manifest_for

from refocused.checkpoints.step.checkpoint_directory import (
    Checkpoint,
    name_of,
    rank_file,
    read_checkpoint,
    step_paths,
)
from refocused.checkpoints.step.checkpoint_manifest import parse_manifest
from refocused.checkpoints.step.staging import (
    Staging,
    clean_leftovers,
    leftovers,
    remove_checkpoint,
)
from refocused.checkpoints.step.verify import FileProblem, verify
from refocused.system.errors import CheckpointError
from refocused.system.locks import FileLock

SHARD = "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt"
OUTSIDE = [{name: {"size": 1, "crc32c": 1}} for name in ("../x", "/etc/x", "zero/../../x", "a\\b")]


def test_a_manifest_without_reasons_is_of_a_rolling_save(step: Checkpoint) -> None:
    fields = json.loads(step.manifest.to_json())
    del fields["tiers"]
    assert parse_manifest(json.dumps(fields).encode(), where="x").tiers == ("rolling",)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema_version": 3}, "schema_version 3; this version of refocused reads 2"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"tokens": None}, "tokens: Input should be a valid integer"),
        ({"tiers": ["hourly"]}, r"tiers\.0: .*rolling.*found 'hourly'"),
        *(({"files": files}, "outside its folder") for files in OUTSIDE),
    ],
)
def test_a_wrong_field_is_reported(
    step: Checkpoint, change: dict[str, object], problem: str
) -> None:
    fields = json.loads(step.manifest.to_json()) | change
    with pytest.raises(CheckpointError, match=f"^here.*{problem}"):
        parse_manifest(json.dumps(fields).encode(), where="here")


def test_checkpoints_are_listed_in_numeric_order(tmp_path: Path) -> None:
    for step in (10000, 9500, 20):
        make_step(tmp_path, step)
    (tmp_path / ".tmp-checkpoint_step_7-ab").mkdir()
    (tmp_path / "checkpoint_step_007").mkdir()
    (tmp_path / "checkpoint_step_8").write_text("a file")
    names = [path.name for path in step_paths(tmp_path).values()]
    assert names == ["checkpoint_step_20", "checkpoint_step_9500", "checkpoint_step_10000"]


DAMAGED: dict[str, Callable[[Path], object]] = {
    "is of step 10, but its folder is named for another step": lambda path: path.rename(
        path.with_name(name_of(30))
    ),
    r"manifest\.json is missing": lambda path: (path / "manifest.json").unlink(),
    "checkpoint_step_10 is not a directory": remove_checkpoint,
    r"manifest\.json has CRC-32C 00000000": lambda path: (path / "manifest.json").write_bytes(b""),
    "COMMITTED is missing": lambda path: (path / "COMMITTED").unlink(),
}


@pytest.mark.parametrize(("problem", "damage"), DAMAGED.items(), ids=DAMAGED)
def test_an_invalid_checkpoint_is_rejected_with_the_reason(
    step: Checkpoint, problem: str, damage: Callable[[Path], object]
) -> None:
    path = damage(step.path)
    with pytest.raises(CheckpointError, match=problem):
        read_checkpoint(path if isinstance(path, Path) else step.path)


@pytest.mark.parametrize("file", ["manifest.json", "COMMITTED", "weights"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_reported_at_once(step: Checkpoint, file: str, kind: str) -> None:
    path = step.path / (rank_file(0) if file == "weights" else file)
    size = path.stat().st_size
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    if file == "weights":
        assert size and verify(step, deep=True)
        return
    with pytest.raises(CheckpointError, match=rf"{file} cannot be read \(not a regular file\)"):
        read_checkpoint(step.path)


def test_a_save_without_a_ranks_state_is_not_committed(tmp_path: Path) -> None:
    staging = Staging(tmp_path, name=name_of(5), token="ab")
    staging.create()
    fill(staging.path, seed=5)
    with pytest.raises(CheckpointError, match=r"ranks/rank_00002\.pt is missing from the manifest"):
        commit(staging, manifest_for(staging.path, 5, world_size=3))
    assert step_paths(tmp_path) == {}


def test_leftovers_are_removed_except_of_a_running_download(tmp_path: Path) -> None:
    names = ".tmp-checkpoint_step_1-a", ".tmp-checkpoint_step_2-fetch", ".del-x"
    save, download, removal = (tmp_path / name for name in names)
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


def folder_to_file(path: Path) -> None:
    for sibling in path.parent.iterdir():
        sibling.unlink()
    path.parent.rmdir()
    path.parent.write_bytes(b"")


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("trainer.json", lambda path: path.write_bytes(b""), "has 0 bytes, not 1,000"),
        (rank_file(1), Path.unlink, "is missing"),
        (SHARD, folder_to_file, "is missing"),
        ("zero/stray.pt", Path.touch, "exists but is not in the manifest"),
    ],
)
def test_problems_in_a_listing_are_found_without_reading(
    step: Checkpoint, file: str, damage: Callable[[Path], object], problem: str
) -> None:
    (step.path / "zero" / ".nfs0001").touch()  # hidden files are ignored
    damage(step.path / file)
    found = verify(step, deep=False)
    assert FileProblem(file, problem) in found
    assert not any(one.file.endswith(".nfs0001") for one in found)
