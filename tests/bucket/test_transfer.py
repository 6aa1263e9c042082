import threading
from pathlib import Path

import pytest

from refocused.bucket.bucket import BlobInfo
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.partial_files import part_path
from refocused.bucket.transfer import download_many, object_files, upload_many
from refocused.system.errors import BucketError


@pytest.fixture
def bucket(tmp_path: Path) -> DirectoryBucket:
    bucket = DirectoryBucket(tmp_path / "bucket")
    for number in range(20):
        bucket.write(f"folder_{number % 3}/x{number:02d}", bytes([number]) * number)
    return bucket


def test_progress_counts_whole_objects_up_to_the_total_in_the_callers_thread(
    bucket: DirectoryBucket, tmp_path: Path
) -> None:
    blobs = sorted(bucket.list(), key=lambda blob: blob.size)
    seen: list[tuple[int, int]] = []
    threads = set()

    def note(done_bytes: int, total_bytes: int) -> None:
        seen.append((done_bytes, total_bytes))
        threads.add(threading.current_thread())

    download_many(bucket, blobs, tmp_path / "down", threads=3, progress=note)
    files = [tmp_path / "down" / blob.name for blob in blobs]
    assert [file.read_bytes() for file in files] == [bytes([n]) * n for n in range(20)]
    assert seen == sorted(seen)
    assert (len(seen), seen[-1]) == (20, (190, 190))
    assert threads == {threading.current_thread()}


def test_all_files_are_stored(bucket: DirectoryBucket, tmp_path: Path) -> None:
    sources = {}
    for number in range(5):
        source = tmp_path / f"source_{number}"
        source.write_bytes(b"x" * number)
        sources[f"new/{number}"] = source
    with pytest.raises(BucketError, match=r"absent: No such file"):  # first, so nothing is sent
        upload_many(bucket, {**sources, "new/b": tmp_path / "absent"})
    assert list(bucket.list("new/")) == []
    upload_many(bucket, sources, threads=2)
    assert [blob.size for blob in bucket.list("new/")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("one", "same"), [("data/A.bin", "data/a.bin"), ("\u00e9/x", "e\u0301/x"), ("A/x", "a")]
)
def test_names_that_some_file_systems_cannot_tell_apart_are_refused(
    tmp_path: Path, one: str, same: str
) -> None:
    with pytest.raises(BucketError, match=f"{one}' and '{same}' cannot both be files below"):
        object_files([one, same], tmp_path / "down", where="gs://b")
    assert len(object_files(["A/x", "a/y", "A/xy"], tmp_path, where="gs://b")) == 3


def test_the_space_needed_excludes_what_part_files_already_hold(
    bucket: DirectoryBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refocused.bucket.partial_files.free_bytes", lambda _: 171)
    with pytest.raises(BucketError, match=r"No space left in .*down: 190 bytes needed, 171 free"):
        download_many(bucket, list(bucket.list()), tmp_path / "down")
    assert not (tmp_path / "down").exists()
    (tmp_path / "down" / "folder_1").mkdir(parents=True)
    part_path(tmp_path / "down" / "folder_1" / "x19").write_bytes(b"1" * 19)
    download_many(bucket, list(bucket.list()), tmp_path / "down")


@pytest.mark.parametrize(
    ("missing", "message", "arrived"),
    [
        (1, r"(?s)1 of 21 downloads from .* failed:\n.*gone_0000: there is no such object", 20),
        (5, r"(?s)5 of 25 downloads .*gone_0000.*gone_0001.*gone_0002.*and 2 more", 20),
        (2000, r"^8 of 2020 .* more were not started", 0),
    ],
)
def test_failures_are_reported_together_and_many_end_the_transfer(
    bucket: DirectoryBucket, tmp_path: Path, missing: int, message: str, arrived: int
) -> None:
    blobs = [BlobInfo(name=f"gone_{number:04d}", size=1) for number in range(missing)]
    with pytest.raises(BucketError, match=message):
        download_many(bucket, [*blobs, *bucket.list()], tmp_path / "down", threads=1)
    assert sum(path.is_file() for path in (tmp_path / "down").rglob("*")) == arrived
