"""Which steps a mirror copies and in what order, and what becomes of them in the bucket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints.mirrored_run import PREFIX, Place, drain, until
from checkpoints.step_samples import flip_byte, make_step

from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.mirror.remote_steps import RemoteSteps
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.staging import remove_step

pytestmark = pytest.mark.slow


def test_a_mirror_far_behind_takes_the_newest_and_skips_what_it_replaces(place: Place) -> None:
    place.bucket.write_text("a file where the folder should be")
    make_step(place.checkpoints, 10, tiers=["epoch"])
    for step in (20, 30, 40, 9500, 10000):
        make_step(place.checkpoints, step)
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: status.blocked))
    status = place.status()
    said = status.heartbeat
    assert (status.waiting, status.skipped) == ((10000, 9500, 10), (40, 30, 20))
    assert (
        status.progress([10, 10000])
        == f"nothing mirrored yet, 2 behind, last error: {status.last_error}"
    )
    (place.run / "mirror.drain").write_text("x")  # at the end nobody waits for what is skipped
    until(place.says(lambda status: status.heartbeat > said))
    place.bucket.unlink()
    assert drain(mirror)
    assert place.committed() == [10, 9500, 10000]
    assert place.status().progress([10, 9500, 10000]) == "mirrored up to step 10,000"


def test_what_was_skipped_is_copied_once_nothing_newer_waits(place: Place) -> None:
    for step in (10, 20, 30, 40):
        make_step(place.checkpoints, step)
    place.mirror().start()
    until(place.says(lambda status: len(status.mirrored) == 4))
    assert place.committed() == [10, 20, 30, 40]


def test_the_newest_few_stay_in_the_bucket_and_the_pointer_names_the_newest(place: Place) -> None:
    for step in (10, 20, 30, 40):
        make_step(place.checkpoints, step, tiers=["epoch" if step == 10 else "rolling"])
    mirror = place.mirror(keep_remote=2)
    mirror.start()
    until(place.says(lambda status: {10, 30, 40} <= set(status.mirrored)))
    make_step(place.checkpoints, 9500)
    until(place.says(lambda status: status.mirrored == (10, 40, 9500)))
    assert drain(mirror)
    assert place.committed() == [10, 40, 9500]
    assert {20, 30} <= {*place.status().unwanted, *place.status().skipped}
    pointer = json.loads((place.bucket / PREFIX / "latest" / "pointer.json").read_text())
    assert pointer == {"name": "checkpoint_step_9500", "step": 9500}
    names = sorted(path.name for path in (place.bucket / PREFIX).iterdir())
    assert names[-1] == "latest"  # what `ls | tail -1` shows
    again = place.mirror(keep_remote=2)  # a new start does not send again what was removed
    again.start()
    assert drain(again)
    assert place.committed() == [10, 40, 9500]


def test_a_step_saved_again_never_replaces_a_complete_copy(place: Place) -> None:
    old = make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: status.mirrored == (10,)))
    remove_step(old.path)
    make_step(place.checkpoints, 10, seed=99, created="2027-01-01T00:00:00Z")
    make_step(place.checkpoints, 20)
    assert not drain(mirror)
    assert "is another checkpoint" in place.status().failed[10]
    remote = RemoteSteps(DirectoryBucket(place.bucket), PREFIX)
    assert remote.manifest("checkpoint_step_10") == old.manifest
    assert place.committed() == [10, 20]


def test_a_damaged_step_is_told_and_does_not_hold_up_the_others(place: Place) -> None:
    flip_byte(make_step(place.checkpoints, 10).trainer)
    make_step(place.checkpoints, 20)
    mirror = place.mirror()
    mirror.start()
    until(place.says(lambda status: status.mirrored == (20,) and status.failed))
    assert "trainer.json has CRC-32C" in place.status().failed[10]
    assert not drain(mirror)
    assert place.committed() == [20]


def test_a_step_removed_while_it_is_copied_is_no_failure_and_gets_no_marker(place: Place) -> None:
    mirror = place.mirror()
    mirror.start()
    step = make_step(place.checkpoints, 10, size=4_000_000)
    until((place.bucket / PREFIX / "checkpoint_step_10" / "manifest.json").exists)
    remove_step(step.path)
    make_step(place.checkpoints, 20)
    until(place.says(lambda status: 20 in status.mirrored))
    assert place.status().failed == {}
    assert place.status().alive
    assert set(place.committed()) <= {10, 20}  # 10 only when all of it had been read before


def test_what_was_mirrored_can_be_fetched_on_another_machine(place: Place, tmp_path: Path) -> None:
    step = make_step(place.checkpoints, 10)
    mirror = place.mirror()
    mirror.start()
    assert drain(mirror)
    other = Catalog(tmp_path / "other", DirectoryBucket(place.bucket), PREFIX)
    assert other.resolve("latest").step == 10
    assert other.fetch("checkpoint_step_10").manifest == step.manifest
