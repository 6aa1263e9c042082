"""What can happen to a saved step on the disk: each damage is found, named, and gone round."""

from __future__ import annotations

import datetime
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints.step_samples import START, flip_byte, make_step, mirrored, reseal, state_file

from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.import_checkpoint import find_elsewhere
from refocused.checkpoints.resume.resume_selection import select_checkpoint
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.staging import remove_step
from refocused.checkpoints.step.step_directory import name_of
from refocused.system.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("heard")

OPTIMIZER = "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt"
RANK = "ranks/rank_00001.pt"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def rewrite_schema(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))


def empty_directory(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.mkdir()


Damage = tuple[str, Callable[[Path], object]]
DAMAGES: dict[str, Damage] = {
    "an optimizer shard is missing": (OPTIMIZER, Path.unlink),
    "a rank's own state is missing": (RANK, Path.unlink),
    "a shard is cut in half": (OPTIMIZER, truncate),
    "a shard is empty": (OPTIMIZER, lambda path: path.write_bytes(b"")),
    "one byte of a shard is flipped": (OPTIMIZER, flip_byte),
    "one byte of a rank's own state is flipped": (RANK, flip_byte),
    "one byte of the training state is flipped": ("trainer.json", flip_byte),
    "the manifest is missing": ("manifest.json", Path.unlink),
    "the manifest is torn": ("manifest.json", truncate),
    "the manifest is empty": ("manifest.json", lambda path: path.write_bytes(b"")),
    "the manifest is of another version": ("manifest.json", rewrite_schema),
    "the directory is empty": ("manifest.json", empty_directory),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("request_", ["auto", "latest"])
def test_a_damaged_newest_step_is_named_and_the_one_before_is_taken(
    local: Path, damage: Damage, request_: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_step(local, 9500)
    file, spoil = damage
    spoil(make_step(local, 10_000).path / file)
    chosen = select_checkpoint(Catalog(local), request_).step
    assert chosen is not None and chosen.step == 9500
    (told,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert "checkpoint_step_10000" in told and file in told
    assert "Trying the checkpoint before it." in told


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_step_that_was_named_is_refused(local: Path, damage: Damage) -> None:
    make_step(local, 9500)
    file, spoil = damage
    spoil(make_step(local, 10_000).path / file)
    with pytest.raises(CheckpointError, match=r"checkpoint_step_10000") as told:
        select_checkpoint(Catalog(local), "10000")
    assert file in str(told.value)


# Content that was written so: size and checksum are right.
UNUSABLE = {
    "no file of torch": (OPTIMIZER, b"", "cannot be loaded: "),
    "a shard without states": (OPTIMIZER, state_file({}), "holds no mapping with optimizer_state"),
    "a rank's state that is a list": (RANK, state_file([1]), "holds no mapping"),
    "the weights of another step": (
        "zero/mp_rank_00_model_states.pt",
        state_file({"global_steps": 7}),
        "is of step 7, not of step 10000",
    ),
    "the training state of another step": (
        "trainer.json",
        b'{"step": 7}',
        "is of step 7, not of step 10000",
    ),
    "a training state without a step": ("trainer.json", b"{}", "is of step None, not of step"),
    "a training state that is no JSON": ("trainer.json", b"{", "is no JSON"),
}


@pytest.mark.parametrize(("file", "content", "problem"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_step_that_cannot_be_loaded_is_named_and_the_one_before_is_taken(
    local: Path, file: str, content: bytes, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_step(local, 9500)
    newest = make_step(local, 10_000)
    reseal(newest.path, file, content)
    chosen = select_checkpoint(Catalog(local), "auto").step
    assert chosen is not None and chosen.step == 9500
    (told,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"checkpoint_step_10000 is corrupt: {file} {problem}" in told
    with pytest.raises(CheckpointError, match=r"checkpoint_step_10000 is corrupt"):
        select_checkpoint(Catalog(local), "10000")


@pytest.mark.parametrize("content", ["checkpoint_step_5", "", "checkpoint_step_99"])
def test_a_file_called_latest_means_nothing(local: Path, content: str) -> None:
    make_step(local, 5)
    make_step(local, 10)
    (local / "latest").write_text(content)
    chosen = select_checkpoint(Catalog(local), "latest").step
    assert chosen is not None and chosen.step == 10


def test_a_step_saved_by_a_clock_that_went_back_is_still_the_newest(local: Path) -> None:
    make_step(local, 10)
    make_step(local, 20, created=START - datetime.timedelta(days=400))
    chosen = select_checkpoint(Catalog(local), "auto").step
    assert chosen is not None and chosen.step == 20


@pytest.mark.parametrize("name", [name_of(10), "my copy"])
def test_a_copy_made_by_hand_out_of_the_bucket_is_a_checkpoint(
    tmp_path: Path, local: Path, bucket: DirectoryBucket, name: str
) -> None:
    mirrored(bucket, make_step(local, 10))
    remove_step(local / name_of(10))
    there = tmp_path / "bucket" / "sample" / "checkpoints" / name_of(10)
    assert (there / COMMITTED).exists()
    shutil.copytree(there, tmp_path / "elsewhere" / name)
    found = find_elsewhere(str(tmp_path / "elsewhere" / name), DirectoryBucket)
    assert found.bring(tmp_path / "brought").step == 10
    shutil.copytree(there, local / name_of(10))
    chosen = select_checkpoint(Catalog(local), "auto").step
    assert chosen is not None and chosen.path.parent == local
