from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints.step_samples import flip_byte, make_step, mirrored

from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.staging import remove_step
from refocused.checkpoints.step.step_directory import read_step
from refocused.checkpoints.step.verify import verify
from refocused.system.errors import BucketError, CheckpointError

PREFIX = "sample/checkpoints"


@pytest.fixture
def catalog(local: Path, bucket: DirectoryBucket) -> Catalog:
    return Catalog(local, bucket, PREFIX)


def there(bucket: DirectoryBucket, step: int, file: str) -> Path:
    return Path(bucket.url) / PREFIX / f"checkpoint_step_{step}" / file


def test_both_places_are_listed_together_in_numeric_order(
    catalog: Catalog, local: Path, bucket: DirectoryBucket
) -> None:
    remove_step(mirrored(bucket, make_step(local, 9500, validation_loss=2.1, loss=2.2)).path)
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


def test_broken_steps_are_listed_with_the_reason_and_are_neither_latest_nor_best(
    catalog: Catalog, local: Path
) -> None:
    make_step(local, 10, validation_loss=3.0)
    (make_step(local, 20, validation_loss=2.0).path / "manifest.json").unlink()
    make_step(local, 30, validation_loss=1.0).trainer.write_bytes(b"")
    entries = catalog.entries()
    assert entries[0].notes == ("latest", "best")
    assert entries[1].local.startswith("broken: manifest.json is missing")
    assert entries[2].tiers == ("rolling",)
    assert entries[2].notes == (
        "incomplete: local: trainer.json has 0 bytes, not 1,000; ignored by resume",
    )


def test_a_copy_without_its_marker_is_a_share_in_percent(
    catalog: Catalog, local: Path, bucket: DirectoryBucket
) -> None:
    step = mirrored(bucket, make_step(local, 10))
    there(bucket, 10, COMMITTED).unlink()
    assert catalog.entries()[0].bucket == "99 %"  # all of it, but nobody has vouched for that
    there(bucket, 10, "trainer.json").unlink()
    there(bucket, 10, "run.yaml").write_bytes(b"cut")
    assert catalog.entries()[0].bucket == "71 %"
    remove_step(step.path)
    [entry] = catalog.entries()
    assert entry.notes == ("incomplete: bucket: 71 % of it; ignored by resume",)
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        catalog.resolve("latest")


def test_an_object_lost_after_the_commit_is_seen(
    catalog: Catalog, local: Path, bucket: DirectoryBucket
) -> None:
    remove_step(mirrored(bucket, make_step(local, 10)).path)
    there(bucket, 10, "model.json").unlink()
    [entry] = catalog.entries()
    assert entry.bucket == "broken: 1 of 7 files are lost"
    with pytest.raises(CheckpointError, match=r"damaged: model\.json is missing"):
        catalog.fetch("checkpoint_step_10")


def test_a_marked_copy_without_its_manifest_is_broken_though_the_step_is_here(
    catalog: Catalog, local: Path, bucket: DirectoryBucket
) -> None:
    mirrored(bucket, make_step(local, 10))
    there(bucket, 10, "manifest.json").unlink()
    [entry] = catalog.entries()
    assert (entry.local, entry.bucket) == ("ok", "broken: manifest.json is missing")


def test_an_empty_place_has_no_entries(catalog: Catalog) -> None:
    assert catalog.entries() == []


def test_a_bucket_that_is_not_there_is_an_error_not_an_empty_list(
    local: Path, tmp_path: Path
) -> None:
    make_step(local, 10)
    with pytest.raises(BucketError, match="does not exist"):
        Catalog(local, DirectoryBucket(tmp_path / "none"), PREFIX).entries()


@pytest.mark.parametrize(
    ("request_", "step"),
    [
        ("latest", 10000),
        ("best", 9500),
        ("9500", 9500),
        ("10,000", 10000),
        ("10_000", 10000),
        ("checkpoint_step_20", 20),
        ("checkpoint-epoch0-step9500-files950", 9500),
    ],
)
def test_a_step_is_found_by_every_name_it_has(local: Path, request_: str, step: int) -> None:
    for saved, loss in ((20, 3.0), (9500, 2.0), (10000, None)):
        make_step(local, saved, validation_loss=loss)
    found = Catalog(local).resolve(request_)
    assert (found.step, found.name) == (step, f"checkpoint_step_{step}")


def test_a_step_only_in_the_bucket_is_found(
    catalog: Catalog, local: Path, bucket: DirectoryBucket
) -> None:
    remove_step(mirrored(bucket, make_step(local, 10)).path)
    found = catalog.resolve("10")
    assert (found.local, found.bucket) == ("-", "ok")


@pytest.mark.parametrize(
    ("request_", "step"),
    [
        ("latest_backup", 9500),
        ("best_model", 20),
        ("epoch_00001", 20),
        ("epoch_2", 9500),
        ("final", 10000),
        ("final_checkpoint_step_10000", 10000),
        ("rolling_step_009500", 9500),
    ],
)
def test_the_names_of_other_trainers_are_found_too(local: Path, request_: str, step: int) -> None:
    make_step(local, 20, validation_loss=2.0, epoch=1, tiers=["epoch"])
    make_step(local, 9500, validation_loss=2.0, epoch=2, tiers=["rolling", "epoch"])
    make_step(local, 10000, epoch=2, tiers=["final"])
    assert Catalog(local).resolve(request_).step == step
    notes = [entry.notes for entry in Catalog(local).entries()]
    assert notes == [("best", "epoch 1"), ("epoch 2",), ("latest", "final")]


@pytest.mark.parametrize("request_", ["epoch_3", "latest_backup", "final", "best_model"])
def test_a_role_that_no_step_has_is_told(local: Path, request_: str) -> None:
    make_step(local, 20)
    with pytest.raises(CheckpointError, match="No usable checkpoint in"):
        Catalog(local).resolve(request_)


@pytest.mark.parametrize("request_", ["1260", "checkpoint-step1260", "checkpoint_step_1260 "])
def test_a_miss_names_the_nearest_steps(local: Path, request_: str) -> None:
    for saved in (10, 1000, 1500, 2000, 12500):
        make_step(local, saved)
    near = r"checkpoint_step_1500, checkpoint_step_1000, checkpoint_step_2000\."
    with pytest.raises(CheckpointError, match=rf"There is no checkpoint .* Nearest: {near}"):
        Catalog(local).resolve(request_)


def test_a_misspelt_word_is_corrected(local: Path) -> None:
    make_step(local, 10)
    with pytest.raises(CheckpointError, match="Nearest: latest"):
        Catalog(local).resolve("lastest")


def test_a_broken_step_is_not_resolved_and_says_why(local: Path) -> None:
    make_step(local, 10)
    make_step(local, 20).path.joinpath("ranks/rank_00001.pt").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint_step_20 cannot be used.*rank_00001"):
        Catalog(local).resolve("20")


def test_without_a_validation_loss_nothing_is_the_best(local: Path) -> None:
    make_step(local, 10)
    with pytest.raises(CheckpointError, match="has a validation loss"):
        Catalog(local).resolve("best")


def test_a_fetched_step_is_whole_and_nothing_else_remains(
    catalog: Catalog, local: Path, bucket: DirectoryBucket
) -> None:
    step = mirrored(bucket, make_step(local, 10))
    remove_step(step.path)
    done: list[int] = []
    fetched = catalog.fetch(
        "checkpoint_step_10", progress=lambda progress: done.append(progress.done_bytes)
    )
    assert fetched == step
    assert verify(read_step(step.path), deep=True) == []
    assert sorted(path.name for path in local.iterdir()) == [".fetch.lock", "checkpoint_step_10"]
    assert max(done) == 7000


def test_a_broken_local_step_is_replaced_by_the_fetched_one(
    catalog: Catalog, local: Path, bucket: DirectoryBucket
) -> None:
    step = mirrored(bucket, make_step(local, 10))
    step.trainer.unlink()
    assert verify(catalog.fetch("checkpoint_step_10"), deep=True) == []
    flip_byte(step.trainer)
    taken_as_it_is = catalog.fetch("checkpoint_step_10")  # its sizes are right
    assert verify(taken_as_it_is, deep=True) != []
    assert verify(catalog.fetch("checkpoint_step_10", replace=True), deep=True) == []


def test_an_interrupted_fetch_goes_on_and_keeps_only_what_is_right(
    catalog: Catalog, local: Path, bucket: DirectoryBucket
) -> None:
    step = mirrored(bucket, make_step(local, 10))
    stage = local / ".tmp-checkpoint_step_10-fetch" / PREFIX / "checkpoint_step_10"
    stage.parent.mkdir(parents=True)
    step.path.rename(stage)
    flip_byte(stage / "run.yaml")
    (stage / "model.json").unlink()
    done = []
    fetched = catalog.fetch(
        "checkpoint_step_10", progress=lambda progress: done.append(progress.done_objects)
    )
    assert done == [1, 2]
    assert verify(fetched, deep=True) == []


def test_a_corrupt_object_is_refused_and_its_file_is_not_kept(
    catalog: Catalog, local: Path, bucket: DirectoryBucket
) -> None:
    remove_step(mirrored(bucket, make_step(local, 10)).path)
    flip_byte(there(bucket, 10, "trainer.json"))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"damaged: trainer\.json has CRC-32C"):
            catalog.fetch("checkpoint_step_10")
    assert not (local / "checkpoint_step_10").exists()


def test_a_step_without_its_marker_is_not_fetched(
    catalog: Catalog, local: Path, bucket: DirectoryBucket
) -> None:
    remove_step(mirrored(bucket, make_step(local, 10)).path)
    there(bucket, 10, COMMITTED).unlink()
    with pytest.raises(CheckpointError, match="has no COMMITTED object"):
        catalog.fetch("checkpoint_step_10")


def test_a_marker_of_other_files_is_refused(
    catalog: Catalog, local: Path, bucket: DirectoryBucket
) -> None:
    remove_step(mirrored(bucket, make_step(local, 10)).path)
    marker = there(bucket, 10, COMMITTED)
    fields = json.loads(marker.read_text())
    marker.write_text(json.dumps(fields | {"manifest_crc32c": 1}))
    with pytest.raises(CheckpointError, match="the marker belongs to other files"):
        catalog.fetch("checkpoint_step_10")
    marker.write_text(json.dumps(fields | {"files": 3}))
    with pytest.raises(CheckpointError, match="counts other files"):
        catalog.fetch("checkpoint_step_10")
    marker.write_text("")
    with pytest.raises(CheckpointError, match="is not the marker"):
        catalog.fetch("checkpoint_step_10")


def test_without_a_bucket_an_absent_step_cannot_be_fetched(local: Path) -> None:
    with pytest.raises(CheckpointError, match="no bucket is known"):
        Catalog(local).fetch("checkpoint_step_10")
