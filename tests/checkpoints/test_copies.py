"""Copies in a bucket: complete with their marker, or without one; and the order of copying."""

import contextlib
import datetime
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import pytest
from checkpoints.faulty_bucket import FaultyBucket
from checkpoints.step_samples import PREFIX, START, copied, flip_byte, make_step, summary
from fakes import Emulator, Fault, Request
from hypothesis import strategies

from refocused.bucket.bucket import Bucket, crc32c_of
from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.mirror.copies import CheckpointCopier, verify_remote
from refocused.checkpoints.mirror.mirror_loop import MAX_BEHIND, CopyOrder, copy_order
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.step.checkpoint_directory import Checkpoint, is_in_use
from refocused.checkpoints.step.checkpoint_manifest import (
    COMMITTED,
    CheckpointManifest,
    Marker,
    SaveReason,
)
from refocused.checkpoints.step.staging import remove_checkpoint
from refocused.checkpoints.step.verify import verify
from refocused.system.errors import BucketError, CheckpointError

NAME = "checkpoint_step_10"
STEP = f"{PREFIX}/{NAME}"


@pytest.fixture
def there(bucket: FaultyBucket) -> Path:
    """The folder of the copy's objects."""
    return bucket.steps / NAME


def copy(bucket: Bucket, step: Checkpoint, stopping: Callable[[], bool] = lambda: False) -> bool:
    return copied(RemoteCheckpoints(bucket, PREFIX), step, stopping)


def repaired(bucket: Bucket, step: Checkpoint) -> bool:
    remote = RemoteCheckpoints(bucket, PREFIX)
    problems = verify_remote(remote, NAME, deep=True)
    copier = CheckpointCopier(remote, stopping=lambda: False, report=lambda _done, _total: None)
    return copier.repair(step, [problem.file for problem in problems])


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_copy_equals_the_directory_and_is_sent_once(
    bucket: FaultyBucket, step: Checkpoint, there: Path
) -> None:
    assert copy(bucket, step)
    crc32c = crc32c_of(step.path / "manifest.json")
    marker = {"files": 7, "bytes": 7000, "manifest_crc32c": crc32c}
    assert json.loads((there / COMMITTED).read_bytes()) == marker
    assert contents(there) == contents(step.path)
    bucket.sent.clear()
    assert copy(bucket, step)
    assert bucket.sent == []
    (there / COMMITTED).unlink()
    (there / "trainer.json").unlink()
    (there / "run.yaml").write_bytes(b"cut")
    assert copy(bucket, step)
    assert sorted(bucket.sent) == ["run.yaml", "trainer.json"]
    assert contents(there) == contents(step.path)


def test_a_lost_object_prevents_the_marker(
    bucket: FaultyBucket, step: Checkpoint, there: Path
) -> None:
    bucket.lost = "model.json"
    with pytest.raises(BucketError, match=r"model\.json was changed or removed after its upload"):
        copy(bucket, step)
    assert not (there / COMMITTED).exists()
    bucket.lost = None
    assert copy(bucket, step)


@pytest.mark.parametrize("damage", [flip_byte, lambda path: path.write_bytes(b"cut"), Path.unlink])
@pytest.mark.parametrize(
    ("damaged", "marked"),
    [("trainer.json", True), ("trainer.json", False), ("manifest.json", True), (COMMITTED, True)],
)
def test_corruption_in_a_bucket_is_found_and_repaired(
    bucket: FaultyBucket,
    step: Checkpoint,
    there: Path,
    damaged: str,
    damage: Callable[[Path], None],
    marked: bool,
) -> None:
    copy(bucket, step)
    damage(there / damaged)
    if not marked:
        (there / COMMITTED).unlink()
    found = verify_remote(RemoteCheckpoints(bucket, PREFIX), NAME, deep=True)
    is_unfinished = not (there / COMMITTED).exists() and damage is Path.unlink
    assert damaged in {problem.file for problem in found} or is_unfinished
    bucket.sent.clear()
    assert repaired(bucket, step)
    assert contents(there) == contents(step.path)
    assert len(bucket.sent) <= 1  # a corrupt manifest may implicate a good file


def test_an_interrupted_copy_of_another_save_is_replaced(
    bucket: FaultyBucket, step: Checkpoint, there: Path
) -> None:
    assert not copy(bucket, step, stopping=lambda: len(bucket.sent) >= 3)
    assert not (there / COMMITTED).exists()
    (there / "notes.txt").write_text("a person's")
    remove_checkpoint(step.path)
    again = make_step(step.path.parent, 10, seed=99)  # the same names and sizes, other bytes
    assert copy(bucket, again)
    notes = {"notes.txt": b"a person's"}
    assert contents(there) == contents(again.path) | notes
    RemoteCheckpoints(bucket, PREFIX).retract(NAME)
    assert contents(there) == notes


LATER = START + datetime.timedelta(days=1)


@pytest.mark.parametrize(
    "change", [{"run": "other"}, {"created": START}, {"created": LATER}, {"run_id": "b"}]
)
@pytest.mark.parametrize("attempt", [copy, repaired])
def test_a_complete_copy_of_another_save_is_never_replaced(
    bucket: FaultyBucket, step: Checkpoint, change: dict[str, object], attempt: Callable[..., bool]
) -> None:
    copy(bucket, step)
    other = make_step(step.path.parents[1] / "other", 10, seed=99, **change)
    with pytest.raises(CheckpointError, match="is another checkpoint, of run sample"):
        attempt(bucket, other)
    assert contents(bucket.steps / NAME) == contents(step.path)


def test_an_upload_of_another_run_is_not_touched(
    bucket: FaultyBucket, tmp_path: Path, there: Path
) -> None:
    theirs = make_step(tmp_path / "theirs", 10, run_id="a")
    copy(bucket, theirs, stopping=lambda: len(bucket.sent) >= 3)
    before = contents(there)
    with pytest.raises(CheckpointError, match="is another checkpoint, of run sample a, saved"):
        copy(bucket, make_step(tmp_path / "mine", 10, seed=99, run_id="b"))
    assert contents(there) == before
    assert copy(bucket, theirs)


def test_a_step_is_not_confused_with_a_longer_number(
    bucket: FaultyBucket, step: Checkpoint, remote: RemoteCheckpoints
) -> None:
    for one in (make_step(step.path.parent, 100), step):
        assert copy(bucket, one)
    assert list(remote.scan()) == [NAME, "checkpoint_step_100"]
    remote.retract(NAME)
    assert list(remote.scan()) == ["checkpoint_step_100"]
    assert COMMITTED in remote.objects("checkpoint_step_100")


def test_a_checkpoint_is_not_removed_while_it_is_copied(
    bucket: FaultyBucket, step: Checkpoint
) -> None:
    used = []
    assert copy(bucket, step, stopping=lambda: used.append(is_in_use(step.path)) is not None)
    assert used and all(used)
    assert not is_in_use(step.path)


def test_a_checkpoint_removed_before_its_marker_gets_none(
    remote: RemoteCheckpoints, step: Checkpoint, there: Path
) -> None:
    def remove(done: int, total: int) -> None:
        if done == total:
            remove_checkpoint(step.path)

    copier = CheckpointCopier(remote, stopping=lambda: False, report=remove)
    with pytest.raises(CheckpointError, match="was removed while it was copied"):
        copier.copy(step)
    assert not (there / COMMITTED).exists()


@pytest.mark.bucket
@pytest.mark.parametrize("unlisted", [(), ("crc32c",)])  # customer-managed keys: not listed
def test_an_object_changed_in_the_store_before_the_marker_is_sent_again(
    emulator: Emulator, step: Checkpoint, unlisted: tuple[str, ...]
) -> None:
    emulator.proxy.unlisted = frozenset(unlisted)
    bucket = open_bucket(f"{emulator.url}/mirror")
    assert copy(bucket, step)
    bucket.delete(f"{STEP}/{COMMITTED}")
    emulator.put(f"mirror/{STEP}/trainer.json", b"x" * 1000)
    assert copy(bucket, step)
    assert bucket.read(f"{STEP}/trainer.json") == (step.path / "trainer.json").read_bytes()
    remove_checkpoint(step.path)
    catalog = Catalog(step.path.parent, bucket, PREFIX)
    [entry] = catalog.entries()
    assert (entry.local, entry.bucket, entry.size) == ("-", "ok", 7000)
    assert verify(catalog.fetch(NAME), deep=True) == []


@pytest.mark.bucket
def test_two_mirrors_of_one_step_make_one_whole_copy(emulator: Emulator, step: Checkpoint) -> None:
    """Mirrors of two machines with copies of one run; each finishes or raises."""
    bucket = open_bucket(emulator.url)
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(copy, bucket, step) for _ in range(2)]:
            assert future.result()
    assert verify_remote(RemoteCheckpoints(bucket, PREFIX), NAME, deep=True) == []
    assert RemoteCheckpoints(bucket, PREFIX).marker(NAME) is not None


@pytest.mark.bucket
def test_two_runs_of_one_name_leave_no_mixed_checkpoint(
    emulator: Emulator, step: Checkpoint, tmp_path: Path
) -> None:
    other = make_step(tmp_path / "other", 10, seed=1, run="other")
    bucket = open_bucket(emulator.url)

    def attempt(mine: Checkpoint) -> None:
        with contextlib.suppress(CheckpointError, BucketError):
            copy(bucket, mine)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(attempt, [step, other]))
    found = {entry.step: entry for entry in Catalog(tmp_path / "new", bucket, PREFIX).entries()}
    if 10 in found and found[10].bucket == "ok":
        fetched = Catalog(tmp_path / "new", bucket, PREFIX).fetch(NAME)
        assert verify(fetched, deep=True) == []
        assert fetched.manifest in (step.manifest, other.manifest)


@pytest.mark.bucket
def test_a_marker_of_other_files_is_named(
    emulator: Emulator, step: Checkpoint, tmp_path: Path
) -> None:
    bucket = open_bucket(emulator.url)
    assert copy(bucket, step)
    ours = bucket.read(f"{STEP}/{COMMITTED}")
    in_other_words = json.dumps(json.loads(ours), separators=(",", ":")).encode()
    foreign = Marker(files=7, bytes=7000, manifest_crc32c=1).to_json()
    ours_crc32c = f"{crc32c_of(step.path / 'manifest.json'):08x}"
    for marker, state in (
        (ours, "ok"),
        (in_other_words, "ok"),
        (foreign, f"broken: manifest.json has CRC-32C {ours_crc32c}, but COMMITTED says 00000001"),
    ):
        emulator.put(f"{STEP}/{COMMITTED}", marker)
        (entry,) = Catalog(tmp_path / "new", open_bucket(emulator.url), PREFIX).entries()
        assert entry.bucket == state


@pytest.mark.bucket
def test_a_manifest_replaced_during_the_upload_is_not_marked(
    emulator: Emulator, step: Checkpoint
) -> None:
    def replace(request: Request) -> bool:
        if request.is_upload and b"checkpoint_step_10/model.json" in request.body:
            emulator.put(f"{STEP}/manifest.json", b"{}")  # by a second run of that name
        return False

    emulator.proxy.script(replace, Fault())
    with pytest.raises(
        BucketError, match=r"manifest\.json was changed or removed after its upload"
    ):
        copy(open_bucket(emulator.url), step)
    assert open_bucket(emulator.url).info(f"{STEP}/{COMMITTED}") is None


any_missing = strategies.dictionaries(
    strategies.integers(0, 60),
    strategies.builds(
        lambda reasons, loss: summary(*reasons, loss=loss),
        strategies.frozensets(strategies.sampled_from(SaveReason), min_size=1),
        strategies.sampled_from([None, 1.0, 2.0]),
    ),
)


def test_the_newest_is_copied_first_and_old_ones_are_skipped() -> None:
    missing = dict.fromkeys(range(1, 7), summary())
    missing |= {1: summary(loss=1.0), 2: summary(SaveReason.EPOCH)}
    missing |= {3: summary(SaveReason.EMERGENCY)}
    assert copy_order(missing) == CopyOrder(to_copy=(6, 5, 2, 1), skipped=(4, 3))
    # Mirrored ones also replace old ones.
    assert copy_order(missing, remote={7: summary()}).skipped == (5, 4, 3)
    assert copy_order(missing, remote={7: summary(loss=0.5)}).skipped == (5, 4, 3, 1)
    assert copy_order(missing, copying=3).to_copy == (3, 6, 5, 2, 1)  # a started copy is finished


@hypothesis.given(any_missing, strategies.sets(strategies.integers(61, 63)))
def test_the_queue_is_bounded_and_loses_nothing(
    missing: dict[int, CheckpointManifest], remote: set[int]
) -> None:
    order = copy_order(missing, remote=dict.fromkeys(remote, summary()))
    assert sorted((*order.to_copy, *order.skipped)) == sorted(missing)
    always = {SaveReason.EPOCH, SaveReason.FINAL}
    losses = [(one.validation_loss, step) for step, one in missing.items() if one.validation_loss]
    best = min(losses, default=(0, -1))[1]
    assert best not in order.skipped
    plain = [s for s in order.to_copy if s != best and not always & {*missing[s].tiers}]
    assert len(plain) <= max(MAX_BEHIND - len(remote), 0)
    assert order.to_copy == tuple(sorted(order.to_copy, reverse=True))
    if missing and not remote:
        assert order.to_copy[0] == max(missing)
