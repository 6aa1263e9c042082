"""A step on its way down: the network is lost, the disk has no room, the process is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints.step_samples import make_step
from fakes import Emulator, Fault, Request

from refocused.bucket.gcs import GcsBucket
from refocused.bucket.gcs_errors import RetryPolicy
from refocused.checkpoints.mirror.copy_step import StepCopier
from refocused.checkpoints.mirror.remote_steps import RemoteSteps
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.staging import remove_step
from refocused.checkpoints.step.step_directory import StepDirectory
from refocused.checkpoints.step.verify import verify
from refocused.system.errors import BucketError

pytestmark = pytest.mark.bucket
SIZE = 100_000


def is_shard(request: Request) -> bool:
    return request.is_download and "optim_states" in request.path


@pytest.fixture
def step(tmp_path: Path, emulator: Emulator) -> StepDirectory:
    """A step that is only in the store."""
    made = make_step(tmp_path / "checkpoints", 10, size=SIZE)
    remote = RemoteSteps(GcsBucket(emulator.url), "run")
    assert StepCopier(remote, stopping=lambda: False, report=lambda *_: None).copy(made)
    remove_step(made.path)
    return made


@pytest.fixture
def catalog(tmp_path: Path, emulator: Emulator) -> Catalog:
    policy = RetryPolicy(attempts=3, sleep=lambda _: None)
    return Catalog(tmp_path / "checkpoints", GcsBucket(emulator.url, retry=policy), "run")


def test_cuts_and_corrupt_answers_cost_only_what_they_spoilt(
    catalog: Catalog, step: StepDirectory, emulator: Emulator
) -> None:
    emulator.proxy.script(is_shard, Fault(cut_after=SIZE // 2), times=2)
    emulator.proxy.script(is_shard, Fault(flip_byte=7))
    emulator.proxy.script(is_shard, Fault(lose_reply=True))
    assert verify(catalog.fetch("checkpoint_step_10"), deep=True) == []


def test_a_network_that_is_lost_shows_no_step_and_the_next_attempt_goes_on(
    catalog: Catalog, step: StepDirectory, emulator: Emulator
) -> None:
    emulator.proxy.script(is_shard, Fault(cut_after=SIZE // 2), times=2)
    emulator.proxy.script(is_shard, Fault(lose_reply=True), times=1000)
    with pytest.raises(BucketError, match="optim_states"):
        catalog.fetch("checkpoint_step_10")
    assert not step.path.exists()
    arrived = {path.name for path in catalog.local.rglob("*") if path.is_file()}
    emulator.proxy._scripts.clear()
    emulator.proxy.requests.clear()
    assert verify(catalog.fetch("checkpoint_step_10"), deep=True) == []
    asked = [request for request in emulator.proxy.requests if request.is_download]
    again = {name for name in arrived for request in asked if request.path.endswith(name)}
    assert arrived and again <= {"COMMITTED"}  # which says what to fetch
    ranges = [request.headers.get("Range") for request in asked if is_shard(request)]
    assert len(ranges) == 2 and any(ranges)  # one of them goes on where it was cut


def test_a_part_file_left_by_an_earlier_version_is_no_damage(
    catalog: Catalog, step: StepDirectory
) -> None:
    stage = catalog.local / f".tmp-{step.path.name}-fetch" / "run" / step.path.name
    stage.mkdir(parents=True)
    (stage / "trainer.json.part").write_bytes(b"{")
    assert verify(catalog.fetch("checkpoint_step_10"), deep=True) == []


def test_a_disk_without_room_is_told_and_shows_no_step(
    catalog: Catalog, step: StepDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr("refocused.bucket.partial_files.free_bytes", lambda _: 1000)
        with pytest.raises(BucketError, match="No space left"):
            catalog.fetch("checkpoint_step_10")
    assert not step.path.exists()
    assert verify(catalog.fetch("checkpoint_step_10"), deep=True) == []
