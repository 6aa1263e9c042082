"""Copying a step that another save, a run that goes back, or a second mirror has a say in."""

from __future__ import annotations

import contextlib
import datetime
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints.step_copies import RecordingBucket, copy, objects
from checkpoints.step_samples import START, make_step
from fakes import Emulator

from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.mirror.copy_step import verify_remote
from refocused.checkpoints.mirror.remote_steps import RemoteSteps
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.staging import remove_step
from refocused.checkpoints.step.step_directory import StepDirectory, is_in_use
from refocused.checkpoints.step.verify import verify
from refocused.system.errors import BucketError, CheckpointError


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


LATER = START + datetime.timedelta(days=1)


@pytest.mark.parametrize(
    "change", [{"run": "other"}, {"created": START}, {"created": LATER}, {"run_id": "b"}]
)
def test_another_copy_that_is_complete_is_never_replaced(
    bucket: RecordingBucket, step: StepDirectory, change: dict[str, object]
) -> None:
    copy(bucket, step)
    before = objects(bucket)
    other = make_step(step.path.parents[1] / "other", 10, seed=99, **change)
    with pytest.raises(CheckpointError, match="is another checkpoint, of run sample"):
        copy(bucket, other)
    assert objects(bucket) == before


def test_an_upload_that_another_run_has_begun_is_left_alone(
    bucket: RecordingBucket, tmp_path: Path
) -> None:
    theirs = make_step(tmp_path / "theirs", 10, run_id="a")
    copy(bucket, theirs, stopping=lambda: len(bucket.sent) >= 3)
    before = objects(bucket)
    with pytest.raises(CheckpointError, match="is another checkpoint, of run sample a, saved"):
        copy(bucket, make_step(tmp_path / "mine", 10, seed=99, run_id="b"))
    assert objects(bucket) == before
    assert copy(bucket, theirs)


def test_objects_that_no_manifest_lists_stay(bucket: RecordingBucket, step: StepDirectory) -> None:
    notes = Path(bucket.url) / "run" / "checkpoint_step_10" / "notes.txt"
    copy(bucket, step, stopping=lambda: len(bucket.sent) >= 3)
    notes.write_text("a person's")
    remove_step(step.path)
    again = make_step(step.path.parent, 10, seed=99)
    assert copy(bucket, again)  # replaces what was left of the other save
    assert notes.read_text() == "a person's"
    RemoteSteps(bucket, "run").retract("checkpoint_step_10")
    assert objects(bucket) == {"notes.txt": b"a person's"}


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
        fetched = Catalog(tmp_path / "new", bucket, "run/").fetch("checkpoint_step_10")
        assert verify(fetched, deep=True) == []
        assert fetched.manifest in (step.manifest, other.manifest)
