"""The copy of a step: all of it and its marker, or no marker; what is damaged is repaired."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints.step_copies import RecordingBucket, copy, objects
from checkpoints.step_samples import flip_byte, make_step
from fakes import Emulator

from refocused.bucket.bucket import Bucket, crc32c_of
from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.mirror.copy_step import StepCopier, verify_remote
from refocused.checkpoints.mirror.remote_steps import RemoteSteps
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.staging import remove_step
from refocused.checkpoints.step.step_directory import StepDirectory
from refocused.checkpoints.step.verify import verify
from refocused.system.errors import BucketError, CheckpointError


def repaired(bucket: Bucket, step: StepDirectory) -> bool:
    remote = RemoteSteps(bucket, "run/")
    problems = verify_remote(remote, step.path.name, deep=True)
    copier = StepCopier(remote, stopping=lambda: False, report=lambda _done, _total: None)
    return copier.repair(step, [problem.file for problem in problems])


def test_the_copy_is_the_directory_and_its_marker(
    bucket: RecordingBucket, step: StepDirectory
) -> None:
    assert copy(bucket, step)
    found = objects(bucket)
    marker = json.loads(found[COMMITTED])
    crc32c = crc32c_of(step.path / "manifest.json")
    assert marker == {"files": 7, "bytes": 7000, "manifest_crc32c": crc32c}
    assert found == {
        path.relative_to(step.path).as_posix(): path.read_bytes()
        for path in step.path.rglob("*")
        if path.is_file()
    }


def test_a_copied_step_is_not_sent_again(bucket: RecordingBucket, step: StepDirectory) -> None:
    copy(bucket, step)
    bucket.sent.clear()
    assert copy(bucket, step)
    assert bucket.sent == []


def test_an_interrupted_copy_sends_only_what_is_missing_or_wrong(
    bucket: RecordingBucket, step: StepDirectory
) -> None:
    copy(bucket, step)
    root = Path(bucket.url) / "run" / "checkpoint_step_10"
    (root / COMMITTED).unlink()
    (root / "trainer.json").unlink()
    (root / "run.yaml").write_bytes(b"cut")
    bucket.sent.clear()
    assert copy(bucket, step)
    assert sorted(bucket.sent) == ["run.yaml", "trainer.json"]
    assert objects(bucket)["run.yaml"] == step.run.read_bytes()


def test_a_copy_told_to_stop_leaves_no_marker(bucket: RecordingBucket, step: StepDirectory) -> None:
    assert not copy(bucket, step, stopping=lambda: len(bucket.sent) >= 2)
    assert COMMITTED not in objects(bucket)
    assert copy(bucket, step)


def test_an_object_lost_on_the_way_keeps_the_marker_away(
    bucket: RecordingBucket, step: StepDirectory
) -> None:
    bucket.lost = "model.json"
    with pytest.raises(BucketError, match=r"model\.json is not what was sent, or is gone"):
        copy(bucket, step)
    assert COMMITTED not in objects(bucket)
    bucket.lost = None
    assert copy(bucket, step)


@pytest.mark.parametrize("damage", [flip_byte, Path.unlink])
def test_a_step_damaged_here_is_not_marked(
    bucket: RecordingBucket, step: StepDirectory, damage: Callable[[Path], None]
) -> None:
    damage(step.trainer)
    with pytest.raises(CheckpointError, match=r"is damaged: trainer\.json"):
        copy(bucket, step)
    assert COMMITTED not in objects(bucket)


@pytest.mark.parametrize("lost", ["trainer.json", "manifest.json"])
def test_a_marked_copy_that_lost_an_object_is_repaired(
    bucket: RecordingBucket, step: StepDirectory, lost: str
) -> None:
    copy(bucket, step)
    whole = objects(bucket)
    (Path(bucket.url) / "run" / "checkpoint_step_10" / lost).unlink()
    bucket.sent.clear()
    assert repaired(bucket, step)
    assert objects(bucket) == whole
    assert bucket.sent == [lost] * (lost != "manifest.json")


@pytest.mark.parametrize("damage", [flip_byte, lambda path: path.write_bytes(b"cut")])
@pytest.mark.parametrize(
    ("damaged", "marked"),
    [("trainer.json", True), ("trainer.json", False), ("manifest.json", True), (COMMITTED, True)],
)
def test_what_is_damaged_in_a_bucket_is_found_and_repaired(
    bucket: RecordingBucket,
    step: StepDirectory,
    damaged: str,
    damage: Callable[[Path], None],
    marked: bool,
) -> None:
    copy(bucket, step)
    whole = objects(bucket)
    there = Path(bucket.url) / "run" / "checkpoint_step_10"
    damage(there / damaged)
    if not marked:
        (there / COMMITTED).unlink()
    found = verify_remote(RemoteSteps(bucket, "run/"), step.path.name, deep=True)
    assert damaged in {problem.file for problem in found}
    bucket.sent.clear()
    assert repaired(bucket, step)
    assert objects(bucket) == whole
    assert len(bucket.sent) <= 1  # a damaged manifest accuses the file that it is wrong about


def test_a_repair_does_not_touch_the_copy_of_another_run(
    bucket: RecordingBucket, step: StepDirectory
) -> None:
    copy(bucket, step)
    before = objects(bucket)
    other = make_step(step.path.parents[1] / "other", 10, seed=99, run="other")
    with pytest.raises(CheckpointError, match="is another checkpoint, of run sample"):
        repaired(bucket, other)
    assert objects(bucket) == before


def test_a_step_is_not_confused_with_one_whose_name_it_begins(
    bucket: RecordingBucket, step: StepDirectory
) -> None:
    longer = make_step(step.path.parent, 100)
    copy(bucket, longer)
    copy(bucket, step)
    remote = RemoteSteps(bucket, "run")
    assert list(remote.scan()) == ["checkpoint_step_10", "checkpoint_step_100"]
    remote.retract("checkpoint_step_10")
    assert list(remote.scan()) == ["checkpoint_step_100"]
    assert COMMITTED in remote.objects("checkpoint_step_100")


@pytest.mark.bucket
@pytest.mark.parametrize("unlisted", [(), ("crc32c",)])  # customer-managed keys: none is listed
def test_an_object_store_gets_the_step_and_gives_it_back(
    emulator: Emulator, step: StepDirectory, unlisted: tuple[str, ...]
) -> None:
    emulator.proxy.unlisted = frozenset(unlisted)
    bucket = open_bucket(f"{emulator.url}/mirror")
    assert copy(bucket, step)
    remove_step(step.path)
    catalog = Catalog(step.path.parent, bucket, "run")
    [entry] = catalog.entries()
    assert (entry.local, entry.bucket, entry.size) == ("-", "ok", 7000)
    assert verify(catalog.fetch("checkpoint_step_10"), deep=True) == []


@pytest.mark.bucket
@pytest.mark.parametrize("unlisted", [(), ("crc32c",)])  # customer-managed keys: none is listed
def test_an_object_changed_in_the_store_before_the_marker_is_sent_again(
    emulator: Emulator, step: StepDirectory, unlisted: tuple[str, ...]
) -> None:
    emulator.proxy.unlisted = frozenset(unlisted)
    bucket = open_bucket(f"{emulator.url}/mirror")
    assert copy(bucket, step)
    bucket.delete(f"run/checkpoint_step_10/{COMMITTED}")
    emulator.put("mirror/run/checkpoint_step_10/trainer.json", b"x" * 1000)
    assert copy(bucket, step)
    assert bucket.read("run/checkpoint_step_10/trainer.json") == step.trainer.read_bytes()
