"""Import of a checkpoint by path or URL: found, verified, adopted by the run."""

import shutil
from pathlib import Path

import pytest
from checkpoints.faulty_bucket import FaultyBucket
from checkpoints.step_samples import PREFIX, flip_byte, make_step, mirrored

from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.import_checkpoint import (
    ForeignCheckpoint,
    adopt,
    find_elsewhere,
    find_in_run,
    own_request,
    require_trust,
    select_elsewhere,
)
from refocused.checkpoints.resume.resume_selection import select_checkpoint
from refocused.checkpoints.step.checkpoint_directory import Checkpoint, name_of, read_checkpoint
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, MANIFEST
from refocused.checkpoints.step.verify import verify
from refocused.system.errors import CheckpointError

SHARD = "zero/zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.fixture
def foreign(tmp_path: Path) -> Checkpoint:
    """Make another run's checkpoint, with files of the same names and sizes."""
    return make_step(tmp_path / "there", 20, seed=99, run="other")


def found(request: object, root: Path) -> ForeignCheckpoint:
    """Find a checkpoint; `gs://` URLs are folders below `root`."""
    return find_elsewhere(
        str(request), lambda url: DirectoryBucket(root / url.removeprefix("gs://"))
    )


def taken(request: object, catalog: Catalog, root: Path) -> Checkpoint:
    selected = select_elsewhere(found(request, root), catalog)
    assert selected.checkpoint is not None
    return adopt(selected.checkpoint, catalog.local, run="mine", branch=selected.branch)


OWN = {
    "auto": "auto",
    "checkpoint_step_10": "checkpoint_step_10",
    "{local}/checkpoint_step_10": "checkpoint_step_10",
    "{local}/../checkpoints/checkpoint_step_10/": "checkpoint_step_10",
    "{mirror}/checkpoint_step_10": "checkpoint_step_10",
    "{mirror}/latest/": "latest",
    "{mirror}/latest/pointer.json": "latest",
    "{mirror}/branch-2/checkpoint_step_10/zero/": "branch-2/checkpoint_step_10",
    "branch-2/checkpoint_step_10": "branch-2/checkpoint_step_10",
    "{local}": None,
    "{local}/my copy": None,
    "other/checkpoint_step_10": None,
    "/checkpoint_step_10": None,
    "gs://other/steps/checkpoint_step_10": None,
}


@pytest.mark.parametrize("mirror", ["a folder", "gs://bucket/prefix/"])
def test_only_paths_below_the_run_are_its_own(
    local: Path, bucket: FaultyBucket, mirror: str
) -> None:
    bucket.url = mirror if "://" in mirror else bucket.url
    catalog = Catalog(local, bucket, PREFIX)
    assert catalog.remote is not None
    local.mkdir(parents=True)
    places = {"local": local, "mirror": catalog.remote.url}
    assert {text: own_request(text.format(**places), catalog) for text in OWN} == OWN


STEPS = "other/checkpoints"


@pytest.mark.parametrize(
    "place",
    ["other", STEPS, f"{STEPS}/latest", f"{STEPS}/{name_of(20)}", f"{STEPS}/{name_of(20)}/zero"],
)
@pytest.mark.parametrize("scheme", ["", "gs://"])
def test_a_checkpoint_folder_or_run_is_imported_once(
    tmp_path: Path, local: Path, place: str, scheme: str
) -> None:
    for step in (9, 20):
        made = make_step(tmp_path / "there" / "other" / "checkpoints", step, run="other")
        if scheme:
            (tmp_path / "cloud").mkdir(exist_ok=True)
            mirrored(DirectoryBucket(tmp_path / "cloud"), made, run="other")
    request = f"gs://cloud/{place}/" if scheme else tmp_path / "there" / place
    own = taken(request, Catalog(local), tmp_path)
    assert own.path == local / name_of(20)
    assert read_checkpoint(own.path).manifest.run == "mine"
    assert verify(own, deep=True) == []
    assert taken(request, Catalog(local), tmp_path) == own
    assert [path.name for path in local.iterdir() if path.is_dir()] == [name_of(20)]


def test_a_step_of_a_run_is_found_on_its_disk_or_in_its_mirror(
    local: Path, catalog: Catalog, bucket: FaultyBucket, tmp_path: Path
) -> None:
    mirrored(bucket, make_step(local, 10))
    here = find_in_run("10", catalog, DirectoryBucket)
    shutil.rmtree(local)
    there = find_in_run(name_of(10), catalog, DirectoryBucket)
    assert here.manifest == there.manifest and here.where != there.where
    own = select_elsewhere(there, Catalog(tmp_path / "new"))
    assert own.branch.parent is not None and own.branch.parent.step == 10
    with pytest.raises(CheckpointError, match=r"no checkpoint '11' .* Nearest: checkpoint_step_10"):
        find_in_run("11", catalog, DirectoryBucket)


def test_an_import_changes_nothing_before_it_is_adopted(
    tmp_path: Path, local: Path, foreign: Checkpoint
) -> None:
    make_step(local, 20)
    catalog = Catalog(local)
    brought = select_elsewhere(found(foreign.path.parent, tmp_path), catalog).checkpoint
    assert brought is not None and verify(brought, deep=True) == []
    assert [entry.name for entry in catalog.entries()] == [name_of(20)]
    own = select_checkpoint(catalog, "auto").checkpoint
    assert own is not None and own.manifest.run == "sample"


def test_an_import_starts_a_branch_and_keeps_the_runs_checkpoints(
    tmp_path: Path, local: Path, bucket: FaultyBucket, catalog: Catalog, foreign: Checkpoint
) -> None:
    for step in (10, 20, 30):
        mirrored(bucket, make_step(local, step))
    step = taken(foreign.path.parent, catalog, tmp_path)
    assert step.manifest.files == foreign.manifest.files
    assert step.path == local / "branch-2" / "checkpoint_step_20"
    assert (step.manifest.branch, step.manifest.ancestry) == (2, ())
    assert read_checkpoint(step.path).manifest == step.manifest
    entries = {entry.name: entry.is_present for entry in catalog.entries() if entry.usable}
    old = dict.fromkeys(map(name_of, (10, 20, 30)), False)
    assert entries == {**old, "branch-2/checkpoint_step_20": True}
    mirrored(bucket, step)  # beside the run's own
    assert catalog.remote is not None
    scanned = catalog.remote.scan()
    assert list(scanned) == list(entries)
    assert all(COMMITTED in objects for objects in scanned.values())


def test_a_corrupt_checkpoint_is_not_imported(
    tmp_path: Path, local: Path, foreign: Checkpoint
) -> None:
    copy = foreign.path.rename(tmp_path / "my copy")
    assert taken(copy, Catalog(local), tmp_path).path == local / name_of(20)
    flip_byte(copy / SHARD)
    other = Catalog(tmp_path / "new" / "checkpoints")
    with pytest.raises(CheckpointError, match=f"{SHARD} has CRC-32C"):
        taken(copy, other, tmp_path)
    assert other.entries() == []


def test_an_unfinished_upload_is_not_imported(
    tmp_path: Path, local: Path, bucket: FaultyBucket
) -> None:
    mirrored(bucket, make_step(local, 20))
    (bucket.steps / name_of(20) / COMMITTED).unlink()
    for place in ("sample", f"sample/checkpoints/{name_of(20)}"):
        with pytest.raises(CheckpointError, match=r"contains no complete one|never finished"):
            found(f"gs://bucket/{place}", tmp_path)


def test_the_newest_complete_checkpoint_of_a_folder_is_imported(tmp_path: Path) -> None:
    for step in (9, 10, 20, 30):
        make_step(tmp_path, step)
    (tmp_path / name_of(30) / SHARD).unlink()
    (tmp_path / name_of(20) / COMMITTED).unlink()
    assert found(tmp_path, tmp_path).manifest.step == 10
    for step in (9, 10):
        (tmp_path / name_of(step) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="is not a checkpoint and contains no complete one"):
        found(tmp_path, tmp_path)


def test_a_checkpoint_of_another_run_must_be_trusted(foreign: Checkpoint) -> None:
    require_trust(foreign.manifest, where="there", run="other", trusted=False)
    require_trust(foreign.manifest, where="there", run="mine", trusted=True)
    message = r"there was saved by run other, not by mine.*--trust"
    with pytest.raises(CheckpointError, match=message):
        require_trust(foreign.manifest, where="there", run="mine", trusted=False)
