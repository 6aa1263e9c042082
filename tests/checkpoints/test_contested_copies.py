"""Copying a step that another save, a run that goes back, or a second mirror has a say in."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints.step_copies import RecordingBucket, copy, objects
from checkpoints.step_samples import START, make_step
from fakes import Emulator

from refocused.bucket.bucket import BlobInfo
from refocused.bucket.directory import DirectoryBucket
from refocused.bucket.open import open_bucket
from refocused.checkpoints.catalog import Catalog
from refocused.checkpoints.mirror_copy import StepCopier
from refocused.checkpoints.remote_steps import COMMITTED, RemoteSteps
from refocused.checkpoints.remote_verify import verify_remote
from refocused.checkpoints.staging import remove_step, set_aside
from refocused.checkpoints.step_directory import StepDirectory, is_in_use
from refocused.checkpoints.verify import verify
from refocused.errors import BucketError, CheckpointError


def test_a_step_saved_again_by_the_same_run_replaces_its_copy(
    bucket: RecordingBucket, step: StepDirectory
) -> None:
    copy(bucket, step)
    remove_step(step.path)
    later = START + datetime.timedelta(days=1)
    again = make_step(step.path.parent, 10, seed=99, created=later)
    assert copy(bucket, again)
    assert objects(bucket)["trainer.json"] == again.trainer.read_bytes()


def test_objects_of_an_interrupted_copy_of_another_save_are_not_mixed_in(
    bucket: RecordingBucket, step: StepDirectory
) -> None:
    copy(bucket, step, stopping=lambda: len(bucket.sent) >= 3)
    remove_step(step.path)
    again = make_step(step.path.parent, 10, seed=99)  # the same names and sizes, other bytes
    assert copy(bucket, again)
    assert all(
        content == (again.path / name).read_bytes()
        for name, content in objects(bucket).items()
        if name != COMMITTED
    )


@pytest.mark.parametrize("change", [{"run": "other"}, {"created": START}])
def test_a_foreign_or_newer_copy_is_never_replaced(
    bucket: RecordingBucket, step: StepDirectory, change: dict[str, object]
) -> None:
    copy(bucket, step)
    before = objects(bucket)
    other = make_step(step.path.parents[1] / "other", 10, seed=99, **change)
    with pytest.raises(CheckpointError, match="is another checkpoint, of run sample"):
        copy(bucket, other)
    assert objects(bucket) == before


class Rewinding(RecordingBucket):
    """A run goes back to an earlier step at one moment of a copy, as its start does."""

    def __init__(self, path: Path, local: Path, moment: str) -> None:
        super().__init__(path)
        self.local = local
        self.moment = moment

    def write(self, name: str, content: bytes, *, overwrite: bool = False) -> BlobInfo:
        self._maybe(f"before {Path(name).name}")
        blob = super().write(name, content, overwrite=overwrite)
        self._maybe(f"after {Path(name).name}")
        return blob

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        blob = super().upload(source, name, crc32c=crc32c)
        self._maybe(f"after {Path(name).name}")
        return blob

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        found = list(super().list(prefix))
        if len(found) == 8:  # all but the marker
            self._maybe("after the last look")
        return iter(found)

    def _maybe(self, moment: str) -> None:
        if moment == self.moment:
            self.moment = ""
            set_aside(self.local / "checkpoint_step_10")
            plain = DirectoryBucket(Path(self.url))
            Catalog(self.local, plain, "run").supersede_after(5)


@pytest.mark.parametrize(
    "moment",
    [
        "before manifest.json",
        "after manifest.json",
        "after trainer.json",
        "after the last look",
        f"before {COMMITTED}",
        f"after {COMMITTED}",
    ],
)
def test_a_step_that_training_leaves_behind_while_it_is_copied_is_never_taken(
    tmp_path: Path, step: StepDirectory, moment: str
) -> None:
    (tmp_path / "bucket").mkdir()
    bucket = Rewinding(tmp_path / "bucket", step.path.parent, moment)
    copier = StepCopier(
        RemoteSteps(bucket, "run/"),
        stopping=lambda: False,
        report=lambda _done, _total: None,
        threads=1,
    )
    with contextlib.suppress(CheckpointError):
        copier.copy(step)
    assert bucket.moment == ""  # it happened
    assert not any(entry.usable for entry in Catalog(step.path.parent, bucket, "run").entries())


def test_a_step_that_a_run_elsewhere_leaves_behind_is_not_committed(
    bucket: RecordingBucket, step: StepDirectory
) -> None:
    marked: list[bool] = []

    def mark_once() -> bool:
        if not marked:  # several threads ask, each before it sends a file
            marked.append(True)
            RemoteSteps(bucket, "run").supersede(step.path.name)
        return False

    with pytest.raises(CheckpointError, match="was marked SUPERSEDED while it was copied"):
        copy(bucket, step, stopping=mark_once)
    assert COMMITTED not in objects(bucket)


def test_a_step_taken_back_is_reinstated(bucket: RecordingBucket, step: StepDirectory) -> None:
    assert not copy(bucket, step, stopping=lambda: len(bucket.sent) >= 2)
    RemoteSteps(bucket, "run").supersede(step.path.name)
    assert copy(bucket, step)
    assert Catalog(step.path.parent, bucket, "run").resolve("latest").step == 10


def test_a_step_is_not_removed_while_it_is_copied(
    bucket: RecordingBucket, step: StepDirectory
) -> None:
    used = []
    assert copy(bucket, step, stopping=lambda: used.append(is_in_use(step.path)) is not None)
    assert used
    assert all(used)
    assert not is_in_use(step.path)


def test_two_mirrors_of_one_step_make_one_whole_copy(
    emulator: Emulator, step: StepDirectory
) -> None:
    """As of two machines with a copy of the same run; each finishes or stops with a reason."""
    bucket = open_bucket(emulator.url)
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(copy, bucket, step) for _ in range(2)]:
            assert future.result()
    assert verify_remote(RemoteSteps(bucket, "run/"), "checkpoint_step_10", deep=True) == []
    assert RemoteSteps(bucket, "run/").marker("checkpoint_step_10") is not None


def test_two_runs_that_meet_under_one_name_leave_nothing_that_is_taken_for_whole_and_is_not(
    emulator: Emulator, step: StepDirectory, tmp_path: Path
) -> None:
    other = make_step(tmp_path / "other", 10, seed=1, run="other")
    bucket = open_bucket(emulator.url)

    def attempt(mine: StepDirectory) -> None:
        with contextlib.suppress(CheckpointError, BucketError):
            copy(bucket, mine)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(attempt, [step, other]))
    found = {entry.step: entry for entry in Catalog(tmp_path / "new", bucket, "run/").entries()}
    if 10 in found and found[10].bucket == "ok":
        fetched = Catalog(tmp_path / "new", bucket, "run/").fetch(10)
        assert verify(fetched, deep=True) == []
        assert fetched.manifest in (step.manifest, other.manifest)
