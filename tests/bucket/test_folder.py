import dataclasses
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from refocused.bucket.bucket import crc32c_of
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.partial_files import part_path
from refocused.system.errors import BucketError


def names(bucket: DirectoryBucket) -> list[str]:
    return [blob.name for blob in bucket.list()]


def test_temporary_and_hidden_files_are_neither_listed_nor_written(tmp_path: Path) -> None:
    hidden = (".hidden", "x.part", ".git/x", "a/.b/x", "a/.x")
    for name in (*hidden, "a/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    bucket = DirectoryBucket(tmp_path)
    assert names(bucket) == ["a/x"]
    for name in hidden:
        assert bucket.info(name) is None
        with pytest.raises(BucketError, match="never listed"):
            bucket.write(name, b"1")


def test_only_links_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"1")
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "x").symlink_to(tmp_path / "secret")
    (tmp_path / "bucket" / "up").symlink_to(tmp_path)
    (tmp_path / "bucket" / "near").symlink_to("y")
    (tmp_path / "bucket" / "y").write_bytes(b"123")
    (tmp_path / "bucket" / "loop").symlink_to("loop")
    (tmp_path / "linked").symlink_to(tmp_path / "bucket")
    bucket = DirectoryBucket(tmp_path / "linked")
    assert bucket.read("near") == b"123"  # a link within the folder
    assert bucket.info("loop") is None
    for call in (
        lambda: [bucket.local_file(blob) for blob in bucket.list()],
        lambda: bucket.read("x"),
        lambda: bucket.info("up/secret"),
        lambda: bucket.write("up/other", b"1"),
    ):
        with pytest.raises(BucketError, match="outside the folder"):
            call()
    assert not (tmp_path / "other").exists()


def test_a_concurrent_writer_that_is_first_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bucket"
    really_synchronize = os.fsync

    def another_writes_first(descriptor: int) -> None:
        (folder / "x").write_bytes(b"theirs")
        really_synchronize(descriptor)

    monkeypatch.setattr(os, "fsync", another_writes_first)
    bucket = DirectoryBucket(folder)
    with pytest.raises(BucketError, match="already holds other bytes"):
        bucket.write("x", b"ours")
    assert (folder / "x").read_bytes() == b"theirs"
    assert [path.name for path in folder.iterdir()] == ["x"]


def test_a_file_system_without_hard_links_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    bucket = DirectoryBucket(tmp_path)
    bucket.write("x", b"1")
    assert bucket.read("x") == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_full_disk_is_reported_before_anything_is_written_and_leaves_no_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    bucket = DirectoryBucket(tmp_path / "bucket")
    with monkeypatch.context() as disk:
        disk.setattr("refocused.bucket.partial_files.free_bytes", lambda _: 3)
        with pytest.raises(BucketError, match=r"No space left in .*bucket.*: 5 bytes needed, 3 fr"):
            bucket.upload(tmp_path / "source", "x")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BucketError, match="No space left"):
        bucket.write("x", b"1")
    assert list((tmp_path / "bucket").iterdir()) == []


def test_a_disk_that_fills_up_during_a_download_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = DirectoryBucket(tmp_path).write("x", b"abcd")
    part_path(tmp_path / "down").symlink_to("/dev/full")
    monkeypatch.setattr("refocused.bucket.partial_files.free_bytes", lambda _: 4)
    with pytest.raises(BucketError, match=r"No space left in .*: 4 bytes needed, 4 free"):
        DirectoryBucket(tmp_path).download(blob, tmp_path / "down")
    assert not (tmp_path / "down").exists()


def test_a_file_that_changed_since_it_was_listed_is_not_downloaded(tmp_path: Path) -> None:
    bucket = DirectoryBucket(tmp_path / "bucket")
    blob = bucket.write("x", b"12345")
    (tmp_path / "bucket" / "x").write_bytes(b"1234")
    with pytest.raises(BucketError, match=r"4 bytes, crc32c 0x.* read, 5 bytes expected"):
        bucket.download(blob, tmp_path / "down" / "x")
    assert list((tmp_path / "down").iterdir()) == []


def test_a_file_can_be_read_in_place_until_it_changes(tmp_path: Path) -> None:
    bucket = DirectoryBucket(tmp_path)
    blob = bucket.write("a/x", b"12345")
    assert bucket.local_file(blob) == tmp_path / "a" / "x"
    checked = dataclasses.replace(blob, crc32c=crc32c_of(tmp_path / "a" / "x"))
    assert bucket.local_file(checked) is None  # only a download compares checksums
    later = tmp_path.stat().st_mtime_ns + 10**9
    os.utime(tmp_path / "a" / "x", ns=(later, later))
    assert bucket.local_file(blob) is None
    (tmp_path / "a" / "x").unlink()
    assert bucket.local_file(blob) is None


def test_a_delete_removes_the_folders_it_leaves_empty(tmp_path: Path) -> None:
    bucket = DirectoryBucket(tmp_path / "bucket")
    with pytest.raises(BucketError, match=r"bucket: the folder does not exist"):
        list(bucket.list())
    bucket.write("a/b/x", b"1")
    bucket.write("a/y", b"1")
    bucket.delete("a/b/x")
    assert names(bucket) == ["a/y"]
    assert not (tmp_path / "bucket" / "a" / "b").exists()
    bucket.delete("a/y")
    assert list((tmp_path / "bucket").iterdir()) == []


@pytest.mark.parametrize("length", [None, 1 << 40])
def test_an_object_that_fills_the_memory_is_not_read_at_once(
    tmp_path: Path, length: int | None
) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BucketError, match=r"manifest\.json: 1,099,511,627,776 bytes"):
        DirectoryBucket(tmp_path).read("manifest.json", length=length)
    assert DirectoryBucket(tmp_path).read("manifest.json", start=9, length=3) == bytes(3)


def test_what_a_killed_upload_leaves_goes_with_the_next_one(tmp_path: Path) -> None:
    bucket, source = DirectoryBucket(tmp_path / "mirror"), tmp_path / "source"
    source.write_bytes(b"x" * 1000)

    def killed() -> Path:
        """Upload in another process, which is killed before the file has its name."""
        code = (
            "import os, sys; from pathlib import Path; from refocused.bucket import folder\n"
            "folder.publish = lambda file, *_, **__: (file.flush(), os._exit(9))\n"
            "folder.DirectoryBucket(Path(sys.argv[1])).upload(Path(sys.argv[2]), 'a/x')"
        )
        arguments = [sys.executable, "-c", code, str(tmp_path / "mirror"), str(source)]
        assert subprocess.run(arguments, check=False).returncode == 9
        (left,) = (tmp_path / "mirror" / "a").iterdir()
        return left

    left = killed()
    with left.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as if its writer were alive
        bucket.write("a/y", b"y")
        assert left.exists()
    bucket.upload(source, "a/x")
    assert sorted(path.name for path in left.parent.iterdir()) == ["x", "y"]
    bucket.delete("a/x")
    bucket.delete("a/y")
    left = killed()
    bucket.delete("a/x")
    assert not left.parent.exists()
