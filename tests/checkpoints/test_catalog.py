"""The catalog of disk and bucket: listing, lookup by name, download."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints.faulty_bucket import FaultyBucket
from checkpoints.step_samples import PREFIX, flip_byte, make_step, mirrored
from fakes import Emulator, Fault, Request

from refocused.bucket.bucket import extended_crc32c
from refocused.bucket.open_bucket import open_bucket
from refocused.bucket.retry import Retry
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.checkpoint_directory import Checkpoint, read_checkpoint
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, MANIFEST
from refocused.checkpoints.step.staging import checkpoints_set_aside, remove_checkpoint
from refocused.checkpoints.step.verify import verify
from refocused.system.errors import BucketError, CheckpointError

NAME = "checkpoint_step_10"


@pytest.fixture
def copied(local: Path, bucket: FaultyBucket) -> Checkpoint:
    """A checkpoint on disk and in the bucket."""
    return mirrored(bucket, make_step(local, 10))


@pytest.fixture
def there(bucket: FaultyBucket) -> Path:
    return bucket.steps / NAME


def test_disk_and_bucket_are_listed_together_in_numeric_order(
    catalog: Catalog, local: Path, bucket: FaultyBucket
) -> None:
    assert catalog.entries() == []
    remove_checkpoint(mirrored(bucket, make_step(local, 9500, validation_loss=2.1, loss=2.2)).path)
    mirrored(bucket, make_step(local, 10000, validation_loss=2.3))
    make_step(local, 10500)
    entries = catalog.entries()
    assert [(entry.step, entry.local, entry.bucket, entry.notes) for entry in entries] == [
        (9500, "-", "ok", ("best",)),
        (10000, "ok", "ok", ()),
        (10500, "ok", "-", ("latest",)),
    ]
    assert (entries[0].size, entries[0].loss, entries[0].validation_loss) == (7000, 2.2, 2.1)
    assert entries[0].created == make_step(local, 9500, token="again").manifest.created
    found = catalog.resolve("9,500")
    assert (found.local, found.bucket) == ("ok", "ok")


def test_manifests_are_read_from_the_bucket_at_the_same_time(
    catalog: Catalog, local: Path, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 5):
        remove_checkpoint(mirrored(bucket, make_step(local, step)).path)
    together, read = threading.Barrier(4), bucket.read

    def read_together(name: str) -> bytes:
        together.wait(60)  # fails unless four reads are under way
        return read(name)

    monkeypatch.setattr(bucket, "read", read_together)
    assert [(entry.step, entry.bucket) for entry in catalog.entries()] == [
        (step, "ok") for step in range(1, 5)
    ]


def test_broken_checkpoints_are_listed_with_the_reason(local: Path) -> None:
    make_step(local, 10, validation_loss=3.0)
    (make_step(local, 20, validation_loss=2.0).path / "manifest.json").unlink()
    (make_step(local, 30, validation_loss=1.0).path / "trainer.json").write_bytes(b"")
    entries = Catalog(local).entries()
    assert entries[0].notes == ("latest", "best")
    assert entries[1].local.startswith("broken: manifest.json is missing")
    assert entries[2].tiers == ("rolling",)
    what = "unusable: local: trainer.json has 0 bytes, not 1,000; ignored by resume"
    assert entries[2].notes == (what,)
    with pytest.raises(CheckpointError, match=r"checkpoint_step_30 cannot be used.*trainer\.json"):
        Catalog(local).resolve("30")


def test_an_uncommitted_copy_shows_its_progress(
    catalog: Catalog, copied: Checkpoint, there: Path
) -> None:
    (there / COMMITTED).unlink()
    assert catalog.entries()[0].bucket == "99 %"  # complete, but without its marker
    (there / "trainer.json").unlink()
    (there / "run.yaml").write_bytes(b"cut")
    assert catalog.entries()[0].bucket == "71 %"
    remove_checkpoint(copied.path)
    [entry] = catalog.entries()
    assert entry.notes == ("unusable: bucket: 71 % of it; ignored by resume",)
    with pytest.raises(CheckpointError, match="No usable checkpoint"):
        catalog.resolve("latest")


NAMES = {
    20: "best, checkpoint_step_20",
    9500: "9500, checkpoint-epoch2-step9500-files950",
    10000: "latest, final, 10_000",
}


def test_a_checkpoint_is_found_by_each_of_its_names(local: Path) -> None:
    make_step(local, 20, validation_loss=2.0, epoch=1, tiers=["epoch"])
    make_step(local, 9500, validation_loss=2.0, epoch=2, tiers=["rolling", "epoch"])
    make_step(local, 10000, epoch=2, tiers=["final"])
    for step, names in NAMES.items():
        for name in names.split(", "):
            assert (name, Catalog(local).resolve(name).step) == (name, step)
    notes = [entry.notes for entry in Catalog(local).entries()]
    assert notes == [("best", "epoch 1"), ("epoch 2",), ("latest", "final")]


def test_an_unknown_name_is_reported_with_the_nearest(local: Path) -> None:
    for saved in (10, 1000, 1500, 2000, 12500):
        make_step(local, saved)
    near = "Nearest: checkpoint_step_1500, checkpoint_step_1000, checkpoint_step_2000."
    for request, message in {
        "final": f"No usable checkpoint in {local} has the role final",
        "best": "has a validation loss",
        **dict.fromkeys(("1260", "checkpoint-step1260", "checkpoint_step_1260 "), near),
        "lastest": "Nearest: latest",
    }.items():
        with pytest.raises(CheckpointError) as told:
            Catalog(local).resolve(request)
        assert message in str(told.value)


def test_a_download_replaces_a_broken_checkpoint(
    catalog: Catalog, local: Path, copied: Checkpoint
) -> None:
    (copied.path / "trainer.json").unlink()
    done: list[int] = []
    assert catalog.fetch(NAME, progress=lambda size, _: done.append(size)) == copied
    assert verify(read_checkpoint(copied.path), deep=True) == []
    assert sorted(path.name for path in local.iterdir()) == [".fetch.lock", NAME]
    assert max(done) == 7000
    flip_byte(copied.path / "trainer.json")
    assert verify(catalog.fetch(NAME), deep=True) != []  # its sizes are right
    assert verify(catalog.fetch(NAME, replace=True), deep=True) == []
    assert not checkpoints_set_aside(local)
    remove_checkpoint(local / NAME)
    another = make_step(local, copied.step, seed=7).manifest  # of another training of the run
    assert catalog.fetch(NAME, replace=True).manifest == copied.manifest
    (aside,) = checkpoints_set_aside(local)
    assert read_checkpoint(aside).manifest == another


def test_an_interrupted_download_continues_with_its_intact_files(
    catalog: Catalog, local: Path, copied: Checkpoint
) -> None:
    stage = local / f".tmp-{NAME}-fetch" / PREFIX / NAME
    stage.parent.mkdir(parents=True)
    copied.path.rename(stage)
    flip_byte(stage / "run.yaml")
    (stage / "model.json").unlink()
    done: list[int] = []
    fetched = catalog.fetch(NAME, progress=lambda size, _: done.append(size))
    assert len(done) == 2
    assert verify(fetched, deep=True) == []


def wrong_marker(**changes: object) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


REFUSALS: dict[str, tuple[str, Callable[[Path], object]]] = {
    r"corrupt: trainer\.json has CRC-32C": ("trainer.json", flip_byte),
    r"corrupt: model\.json is missing": ("model.json", Path.unlink),
    r"corrupt: manifest\.json is missing": ("manifest.json", Path.unlink),
    "has no COMMITTED object": (COMMITTED, Path.unlink),
    "the marker belongs to other files": (COMMITTED, wrong_marker(manifest_crc32c=1)),
    "does not match the files in": (COMMITTED, wrong_marker(files=3)),
    "is not the marker": (COMMITTED, lambda path: path.write_text("")),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_an_incomplete_copy_in_the_bucket_is_rejected(
    catalog: Catalog, copied: Checkpoint, there: Path, refusal: str
) -> None:
    remove_checkpoint(copied.path)
    file, damage = REFUSALS[refusal]
    damage(there / file)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=refusal):
            catalog.fetch(NAME)
    assert not copied.path.exists()


SIZE = 100_000


def is_shard(request: Request) -> bool:
    return request.is_download and "optim_states" in request.path


def is_shard_of(rank: int) -> Callable[[Request], bool]:
    return lambda request: is_shard(request) and f"rank_{rank}_" in request.path


@pytest.fixture
def far(local: Path, emulator: Emulator) -> Catalog:
    """A checkpoint only in the bucket, which may fail."""
    remove_checkpoint(mirrored(open_bucket(emulator.url), make_step(local, 10, size=SIZE)).path)
    policy = Retry(attempts=3, sleep=lambda _: None)
    return Catalog(local, open_bucket(emulator.url, retry=policy), PREFIX)


@pytest.mark.bucket
def test_listed_files_take_one_request_each_and_are_read_again_if_overwritten(
    far: Catalog, emulator: Emulator
) -> None:
    assert far.remote is not None
    listed = far.remote.scan()[NAME]
    emulator.proxy.requests.clear()
    assert [entry.bucket for entry in far.entries()] == ["ok"]
    for file in (MANIFEST, COMMITTED):
        assert sum(request.path.endswith(file) for request in emulator.proxy.requests) == 1
    other = far.remote.manifest(NAME).model_copy(update={"loss": 1.25, "run": "a longer name"})
    far.remote.bucket.write(listed[MANIFEST].name, other.to_json(), overwrite=True)
    marker = other.marker(extended_crc32c(0, other.to_json())).to_json()
    far.remote.commit(NAME, marker, overwrite=True)
    assert far.remote.manifest(NAME, listed) == other


@pytest.mark.bucket
def test_only_files_cut_or_corrupted_in_transfer_are_downloaded_again(
    far: Catalog, emulator: Emulator
) -> None:
    emulator.proxy.script(is_shard, Fault(cut_after=SIZE // 2), times=2)
    emulator.proxy.script(is_shard, Fault(flip_byte=7))
    emulator.proxy.script(is_shard, Fault(lose_reply=True))
    assert verify(far.fetch(NAME), deep=True) == []


@pytest.mark.bucket
def test_a_lost_network_leaves_no_checkpoint_and_a_retry_continues(
    far: Catalog, emulator: Emulator
) -> None:
    for rank in (0, 1):  # each file by itself: both cuts of one file would complete it
        emulator.proxy.script(is_shard_of(rank), Fault(cut_after=SIZE // 2))
    emulator.proxy.script(is_shard, Fault(lose_reply=True), times=1000)
    with pytest.raises(BucketError, match="optim_states"):
        far.fetch(NAME)
    assert not (far.local / NAME).exists()
    arrived = {path.name for path in far.local.rglob("*") if path.is_file()}
    emulator.proxy._scripts.clear()
    emulator.proxy.requests.clear()
    assert verify(far.fetch(NAME), deep=True) == []
    asked = [request for request in emulator.proxy.requests if request.is_download]
    again = {name for name in arrived for request in asked if request.path.endswith(name)}
    assert arrived and again <= {"COMMITTED"}  # which determines what to download
    ranges = [request.headers.get("Range") for request in asked if is_shard(request)]
    assert len(ranges) == 2 and any(ranges)  # one continues where it was cut


@pytest.mark.bucket
def test_a_full_disk_is_reported_and_leaves_no_checkpoint(
    far: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr("refocused.bucket.partial_files.free_bytes", lambda _: 1000)
        with pytest.raises(BucketError, match="No space left"):
            far.fetch(NAME)
    assert not (far.local / NAME).exists()
    assert verify(far.fetch(NAME), deep=True) == []
