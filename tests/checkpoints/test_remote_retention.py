from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints.step_samples import flip_byte, make_step
from fakes import Emulator

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.mirror.copy_step import StepCopier, verify_remote
from refocused.checkpoints.mirror.remote_steps import RemoteRetention, RemoteSteps
from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, SUPERSEDED
from refocused.system.errors import BucketError


def steps_in(remote: RemoteSteps) -> list[int | None]:
    return [FIRST_BRANCH.step_of(name) for name in remote.scan()]


class BreakingBucket(DirectoryBucket):
    """Ends after so many removals, as a killed process would."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.removals_left: int | None = None
        self.reads: list[str] = []

    def delete(self, name: str) -> None:
        if self.removals_left is not None:
            if not self.removals_left:
                raise BucketError("killed")
            self.removals_left -= 1
        super().delete(name)

    def read(self, name: str, *, start: int = 0, length: int | None = None) -> bytes:
        self.reads.append(name)
        return super().read(name, start=start, length=length)


@pytest.fixture
def bucket(tmp_path: Path) -> BreakingBucket:
    (tmp_path / "bucket").mkdir()
    return BreakingBucket(tmp_path / "bucket")


def mirrored(bucket: Bucket, local: Path, step: int, **changes: object) -> None:
    saved = make_step(local, step, **changes)
    remote = RemoteSteps(bucket, "run")
    copier = StepCopier(remote, stopping=lambda: False, report=lambda _done, _total: None)
    assert copier.copy(saved)


def test_labels_and_the_best_decide_what_stays_there(
    bucket: BreakingBucket, tmp_path: Path
) -> None:
    mirrored(bucket, tmp_path, 10, validation_loss=1.0)
    mirrored(bucket, tmp_path, 20, tiers=["epoch"])
    mirrored(bucket, tmp_path, 30, tiers=["emergency"])
    mirrored(bucket, tmp_path, 40, tiers=["emergency"])
    for step in (50, 9500, 10000, 10500):
        mirrored(bucket, tmp_path, step)
    remote = RemoteSteps(bucket, "run")
    (tmp_path / "bucket" / "run" / "checkpoint_step_10500" / SUPERSEDED).touch()  # by version 0.1
    assert RemoteRetention(remote, keep=2).thin_out() == [30, 50]
    assert steps_in(remote) == [10, 20, 40, 9500, 10000, 10500]


def test_checkpoints_of_other_branches_and_unreadable_ones_stay(
    bucket: BreakingBucket, tmp_path: Path
) -> None:
    for step in (10, 20, 30, 40):
        mirrored(bucket, tmp_path, step)
    mirrored(bucket, tmp_path, 30, branch=2, ancestry=((1, 20),))
    mirrored(bucket, tmp_path, 40, branch=2, ancestry=((1, 20),))
    remote = RemoteSteps(bucket, "run")
    branch = Branch(number=2, ancestry=((1, 20),))
    (tmp_path / "bucket" / "run" / "checkpoint_step_10" / "manifest.json").write_text("{")
    assert RemoteRetention(remote, branch, keep=1).thin_out() == [20]
    assert list(remote.scan()) == [
        "checkpoint_step_10",
        "checkpoint_step_30",
        "checkpoint_step_40",
        "branch-2/checkpoint_step_30",
        "branch-2/checkpoint_step_40",
    ]


def test_a_half_uploaded_step_goes_when_nobody_is_at_it(
    bucket: BreakingBucket, tmp_path: Path
) -> None:
    for step in (10, 20, 30, 40):
        mirrored(bucket, tmp_path, step)
    remote = RemoteSteps(bucket, "run")
    remote.unmark("checkpoint_step_10")
    remote.unmark("checkpoint_step_40")
    retention = RemoteRetention(remote, keep=2)
    assert retention.thin_out(in_use=[10]) == []
    assert retention.thin_out() == [10]  # the newer one may still be of use
    assert steps_in(remote) == [20, 30, 40]


def test_manifests_are_read_once(bucket: BreakingBucket, tmp_path: Path) -> None:
    for step in (10, 20):
        mirrored(bucket, tmp_path, step)
    retention = RemoteRetention(RemoteSteps(bucket, "run"), keep=2)
    bucket.reads.clear()
    retention.steps()
    assert len(bucket.reads) == 2
    retention.steps()
    assert len(bucket.reads) == 2


def test_a_step_whose_manifest_is_torn_does_not_count(
    bucket: BreakingBucket, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        mirrored(bucket, tmp_path, step)
    flip_byte(Path(bucket.url) / "run" / "checkpoint_step_20" / "manifest.json")
    (Path(bucket.url) / "run" / "checkpoint_step_20" / "manifest.json").write_text("{")
    assert RemoteRetention(RemoteSteps(bucket, "run"), keep=2).thin_out() == []


def test_a_removal_that_ends_at_any_moment_leaves_no_marked_step_that_is_broken(
    bucket: BreakingBucket, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        mirrored(bucket, tmp_path, step)
    remote = RemoteSteps(bucket, "run")
    ends = 0
    while "checkpoint_step_10" in remote.scan():
        bucket.removals_left = 2  # the marker, which may be gone, and one more
        try:
            RemoteRetention(remote, keep=2).thin_out()
        except BucketError:
            ends += 1
        for name, objects in remote.scan().items():
            if COMMITTED in objects:
                assert verify_remote(remote, name, deep=True) == []
            else:
                assert name == "checkpoint_step_10"
    assert ends > 5
    assert steps_in(remote) == [20, 30]


def test_a_local_step_that_would_be_removed_at_once_is_not_wanted(
    bucket: BreakingBucket, tmp_path: Path
) -> None:
    for step in (40, 50):
        mirrored(bucket, tmp_path, step)
    lacking = {
        step: make_step(tmp_path, step, **changes).manifest
        for step, changes in (
            (10, {"validation_loss": 1.0}),
            (20, {}),
            (30, {"tiers": ["final"]}),
            (60, {}),
        )
    }
    retention = RemoteRetention(RemoteSteps(bucket, "run"), keep=2)
    assert retention.unwanted(lacking) == {20}


@pytest.mark.bucket
def test_an_object_store_is_thinned_out_and_removing_twice_is_no_error(
    emulator: Emulator, tmp_path: Path
) -> None:
    bucket = open_bucket(f"{emulator.url}/mirror")
    for step in (10, 20, 30):
        mirrored(bucket, tmp_path, step)
    remote = RemoteSteps(bucket, "run")
    assert RemoteRetention(remote, keep=2).thin_out() == [10]
    remote.retract("checkpoint_step_10")
    assert steps_in(remote) == [20, 30]
