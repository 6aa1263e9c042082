from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints.step_samples import START, flip_byte, make_step
from fakes import Emulator

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.checksum import crc32c_of
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


class RecordingBucket(DirectoryBucket):
    """Notes what is sent, and can lose an object right after it was stored."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.sent: list[str] = []
        self.lost: str | None = None

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        self.sent.append(Path(name).name)
        stored = super().upload(source, name, crc32c=crc32c)
        if self.lost is not None and name.endswith(self.lost):
            self.delete(name)
        return stored


@pytest.fixture
def bucket(tmp_path: Path) -> RecordingBucket:
    (tmp_path / "bucket").mkdir()
    return RecordingBucket(tmp_path / "bucket")


@pytest.fixture
def step(tmp_path: Path) -> StepDirectory:
    return make_step(tmp_path / "checkpoints", 10)


def copy(bucket: Bucket, step: StepDirectory, stopping: Callable[[], bool] = lambda: False) -> bool:
    remote = RemoteSteps(bucket, "run/")
    return StepCopier(remote, stopping=stopping, report=lambda _done, _total: None).copy(step)


def repaired(bucket: Bucket, step: StepDirectory) -> bool:
    remote = RemoteSteps(bucket, "run/")
    problems = verify_remote(remote, step.path.name, deep=True)
    copier = StepCopier(remote, stopping=lambda: False, report=lambda _done, _total: None)
    return copier.repair(step, [problem.file for problem in problems])


def objects(bucket: DirectoryBucket) -> dict[str, bytes]:
    root = Path(bucket.url) / "run" / "checkpoint_step_10"
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_the_copy_is_the_directory_and_its_marker(
    bucket: RecordingBucket, step: StepDirectory
) -> None:
    assert copy(bucket, step)
    found = objects(bucket)
    marker = json.loads(found.pop(COMMITTED))
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


def test_a_step_is_not_confused_with_one_whose_name_it_begins(
    bucket: RecordingBucket, step: StepDirectory
) -> None:
    longer = make_step(step.path.parent, 100)
    copy(bucket, longer)
    copy(bucket, step)
    remote = RemoteSteps(bucket, "run")
    assert sorted(remote.scan()) == [10, 100]
    remote.retract("checkpoint_step_10")
    assert sorted(remote.scan()) == [100]
    assert COMMITTED in remote.objects("checkpoint_step_100")


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


@pytest.mark.bucket
def test_an_object_store_gets_the_step_and_gives_it_back(
    emulator: Emulator, step: StepDirectory
) -> None:
    bucket = open_bucket(f"{emulator.url}/mirror")
    assert copy(bucket, step)
    remove_step(step.path)
    catalog = Catalog(step.path.parent, bucket, "run")
    [entry] = catalog.entries()
    assert (entry.local, entry.bucket, entry.size) == ("-", "ok", 7000)
    assert verify(catalog.fetch(10), deep=True) == []


@pytest.mark.bucket
def test_an_object_changed_in_the_store_before_the_marker_is_sent_again(
    emulator: Emulator, step: StepDirectory
) -> None:
    bucket = open_bucket(f"{emulator.url}/mirror")
    assert copy(bucket, step)
    bucket.delete(f"run/checkpoint_step_10/{COMMITTED}")
    emulator.put("mirror/run/checkpoint_step_10/trainer.json", b"x" * 1000)
    assert copy(bucket, step)
    assert bucket.read("run/checkpoint_step_10/trainer.json") == step.trainer.read_bytes()


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
