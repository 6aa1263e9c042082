"""Selection of a checkpoint: corrupt ones are skipped, transient errors are not."""

import datetime
import errno
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints.faulty_bucket import FaultyBucket
from checkpoints.step_samples import (
    PREFIX,
    START,
    flip_byte,
    make_step,
    mirrored,
    reseal,
    state_file,
)

from refocused.bucket.bucket import crc32c_of
from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.resume.catalog import Catalog
from refocused.checkpoints.resume.import_checkpoint import find_elsewhere
from refocused.checkpoints.resume.resume_selection import select_checkpoint
from refocused.checkpoints.step.checkpoint_directory import name_of, read_checkpoint
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.staging import remove_checkpoint
from refocused.checkpoints.step.verify import verify
from refocused.system.errors import (
    BucketError,
    CheckpointError,
    CheckpointUnavailableError,
    CorruptCheckpointError,
)
from refocused.system.locks import FileLock

OPTIMIZER = "zero/zero_pp_rank_1_mp_rank_00_optim_states.pt"
RANK = "ranks/rank_00001.pt"


def chosen(catalog: Catalog, request: str = "auto") -> int | None:
    step = select_checkpoint(catalog, request).checkpoint
    if step is None:
        return None
    assert step.path.parent == catalog.local
    assert verify(step, deep=True) == []
    return step.step


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_new_run_starts_from_scratch_unless_latest_is_requested(local: Path) -> None:
    assert chosen(Catalog(local), "auto") is None
    assert chosen(Catalog(local), "none") is None
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* --resume auto or none"):
        select_checkpoint(Catalog(local), "latest")


def test_a_clock_set_back_does_not_change_the_newest(local: Path) -> None:
    make_step(local, 9500, validation_loss=2.0)
    make_step(local, 10_000, validation_loss=3.0, created=START - datetime.timedelta(days=400))
    assert [chosen(Catalog(local), request) for request in ("auto", "best")] == [10_000, 9500]


@pytest.mark.parametrize("content", ["checkpoint_step_5", "", "checkpoint_step_99"])
def test_a_file_called_latest_means_nothing(local: Path, content: str) -> None:
    make_step(local, 5)
    make_step(local, 10)
    (local / "latest").write_text(content)
    assert chosen(Catalog(local), "latest") == 10


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def empty_directory(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.mkdir()


DAMAGES = {
    "an optimizer shard is missing": (OPTIMIZER, Path.unlink),
    "a rank's own state is missing": (RANK, Path.unlink),
    "a shard is cut in half": (OPTIMIZER, truncate),
    "a shard is empty": (OPTIMIZER, empty),
    "one byte of a shard is flipped": (OPTIMIZER, flip_byte),
    "one byte of a rank's own state is flipped": (RANK, flip_byte),
    "one byte of the training state is flipped": ("trainer.json", flip_byte),
    "the manifest is missing": ("manifest.json", Path.unlink),
    "the manifest is torn": ("manifest.json", truncate),
    "the manifest is empty": ("manifest.json", empty),
    "the directory is empty": ("manifest.json", empty_directory),
}


@pytest.mark.parametrize(("file", "spoil"), DAMAGES.values(), ids=DAMAGES)
def test_a_corrupt_newest_checkpoint_is_skipped(
    local: Path, file: str, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    make_step(local, 9500)
    spoil(make_step(local, 10_000).path / file)
    for request in ("auto", "latest"):
        caplog.clear()
        assert chosen(Catalog(local), request) == 9500
        (told,) = warnings(caplog)
        assert "checkpoint_step_10000" in told and file in told
        assert "Trying the checkpoint before it." in told
    with pytest.raises(CheckpointError, match=r"checkpoint_step_10000") as refused:
        select_checkpoint(Catalog(local), "10000")
    assert file in str(refused.value)
    if spoil is flip_byte:
        assert "the newest usable one with --resume latest" in str(refused.value)


# Wrong content with the right size and checksum.
UNUSABLE = {
    "no file of torch": (OPTIMIZER, b"", "cannot be loaded: "),
    "a shard without states": (OPTIMIZER, state_file({}), "is not a mapping with optimizer_state"),
    "a rank's state that is a list": (RANK, state_file([1]), "is not a mapping"),
    "the weights of another step": (
        "zero/mp_rank_00_model_states.pt",
        state_file({"global_steps": 7}),
        "is of step 7, not of step 10000",
    ),
    "the training state of another step": (
        "trainer.json",
        b'{"step": 7}',
        "is of step 7, not of step 10000",
    ),
    "a training state without a step": ("trainer.json", b"{}", "is of step None, not of step"),
    "a training state that is no JSON": ("trainer.json", b"{", "is not JSON"),
}


@pytest.mark.parametrize(("file", "content", "problem"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unloadable_checkpoint_is_skipped(
    local: Path, file: str, content: bytes, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_step(local, 9500)
    reseal(make_step(local, 10_000).path, file, content)
    assert chosen(Catalog(local)) == 9500
    (told,) = warnings(caplog)
    assert f"checkpoint_step_10000 is corrupt: {file} {problem}" in told
    with pytest.raises(CheckpointError, match=r"checkpoint_step_10000 is corrupt"):
        select_checkpoint(Catalog(local), "10000")


def test_a_run_with_only_corrupt_checkpoints_does_not_start(local: Path) -> None:
    for step in (10, 20):
        flip_byte(make_step(local, step).path / OPTIMIZER)
    for request in ("auto", "latest"):
        with pytest.raises(CheckpointError, match=r"all 2 are corrupt.*_step_20.*--run NAME"):
            select_checkpoint(Catalog(local), request)


def test_resume_or_start_starts_beside_corrupt_checkpoints_alone(
    local: Path, bucket: FaultyBucket
) -> None:
    assert chosen(Catalog(local), "or-start") is None
    whole = make_step(local, 10)
    assert chosen(Catalog(local), "or-start") == 10
    flip_byte(mirrored(bucket, whole).path / OPTIMIZER)
    assert chosen(Catalog(local, bucket, PREFIX), "or-start") == 10  # the mirror's
    flip_byte(whole.path / OPTIMIZER)
    anew = select_checkpoint(Catalog(local), "or-start")
    assert (anew.checkpoint, anew.branch.number, anew.corrupt) == (None, 2, ())
    bucket.is_down = True
    with pytest.raises(CorruptCheckpointError):  # the mirror may have a whole one
        select_checkpoint(Catalog(local, bucket, PREFIX), "or-start")


def test_every_flipped_bit_of_a_local_manifest_is_found(local: Path) -> None:
    """Regression: 11.7 % were not detected."""
    path = make_step(local, 20).path / "manifest.json"
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CorruptCheckpointError):
            read_checkpoint(path.parent)
    path.write_bytes(content)
    assert read_checkpoint(path.parent).step == 20


def test_no_flipped_bit_of_a_manifest_in_the_mirror_ends_a_start(
    local: Path, bucket: FaultyBucket, catalog: Catalog
) -> None:
    """Regression: with the digit of its schema flipped, it was taken for a later version's."""
    for step in (10, 20):
        mirrored(bucket, make_step(local.parent / "another", step))
    path = bucket.steps / "checkpoint_step_20" / "manifest.json"
    content = path.read_bytes()
    first = content.index(b'"schema_version": ')  # every bit of this line
    for bit in range(8 * first, 8 * content.index(b"\n", first)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        (entry,) = (entry for entry in catalog.entries() if entry.step == 20)
        assert entry.bucket.startswith("broken: manifest.json has CRC-32C"), entry
    assert chosen(Catalog(local, bucket, PREFIX), "latest") == 10
    (path.parent / "COMMITTED").unlink()  # an upload that never finished
    assert chosen(Catalog(local, bucket, PREFIX), "latest") == 10


@pytest.mark.parametrize("name", [name_of(10), "my copy"])
def test_a_manual_copy_from_the_bucket_is_a_checkpoint(
    tmp_path: Path, local: Path, bucket: FaultyBucket, name: str
) -> None:
    mirrored(bucket, make_step(local, 10))
    remove_checkpoint(local / name_of(10))
    there = bucket.steps / name_of(10)
    assert (there / COMMITTED).exists()
    shutil.copytree(there, tmp_path / "elsewhere" / name)
    found = find_elsewhere(str(tmp_path / "elsewhere" / name), DirectoryBucket)
    assert found.copy_into(tmp_path / "brought").step == 10
    shutil.copytree(there, local / name_of(10))
    assert chosen(Catalog(local)) == 10


def test_a_bucket_outage_is_ignored_if_a_local_checkpoint_suffices(
    catalog: Catalog, local: Path, bucket: FaultyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.is_down = True
    with pytest.raises(
        BucketError, match="No such checkpoint is on this disk, and the mirror may have one"
    ):
        select_checkpoint(catalog, "auto")
    assert chosen(catalog, "none") is None
    make_step(local, 10, validation_loss=2.0)
    for request in ("20", "best"):  # only the bucket can tell
        with pytest.raises(BucketError, match="the bucket is down"):
            select_checkpoint(Catalog(local, bucket, PREFIX), request)
    caplog.clear()
    for request in ("auto", "10"):
        assert chosen(Catalog(local, bucket, PREFIX), request) == 10
    (told,) = set(warnings(caplog))
    assert told == "the bucket is down. Using only the checkpoints on this disk."


def test_a_lock_held_by_another_process_is_waited_for(
    catalog: Catalog, local: Path, bucket: FaultyBucket, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: an earlier checkpoint was used, and the newer one abandoned."""
    make_step(local, 10)
    remove_checkpoint(mirrored(bucket, make_step(local, 20)).path)
    lock = FileLock(local / ".fetch.lock")
    assert lock.acquire()
    with ThreadPoolExecutor(1) as thread:
        choice = thread.submit(chosen, catalog)
        while not any("Waiting up to 15 min" in told for told in warnings(caplog)):
            assert not choice.done()
        lock.release()
        assert choice.result() == 20


@pytest.mark.parametrize("request_", ["auto", "latest", "20"])
def test_a_lock_held_forever_is_not_taken_for_corruption(
    catalog: Catalog,
    local: Path,
    bucket: FaultyBucket,
    request_: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("refocused.checkpoints.mirror.copies.LOCK_SECONDS", 0.0)
    make_step(local, 10)
    remove_checkpoint(mirrored(bucket, make_step(local, 20)).path)
    lock = FileLock(local / ".fetch.lock")
    assert lock.acquire()
    with pytest.raises(CheckpointUnavailableError, match="Start again when it has finished"):
        select_checkpoint(catalog, request_)
    lock.release()
    assert chosen(catalog, request_) == 20


@pytest.mark.parametrize("request_", ["auto", "20"])
def test_an_unreadable_file_is_not_taken_for_corruption(
    local: Path, request_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_step(local, 10)
    make_step(local, 20)

    def stale(path: Path) -> int:
        if "checkpoint_step_20" in str(path) and path.name == "trainer.json":
            raise OSError(errno.ESTALE, "Stale file handle")
        return crc32c_of(path)

    monkeypatch.setattr("refocused.checkpoints.step.verify.crc32c_of", stale)
    with pytest.raises(CheckpointUnavailableError, match=r"trainer\.json cannot be read \(Stale"):
        select_checkpoint(Catalog(local), request_)
