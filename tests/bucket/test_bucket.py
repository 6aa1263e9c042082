"""The contract of both implementations of the protocol, and the addresses of each."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from refocused.bucket.bucket import BlobInfo, Bucket, crc32c_of, with_checksum
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.open_bucket import open_bucket
from refocused.bucket.store import Store
from refocused.system.errors import BucketError, ConfigError


@pytest.fixture(
    params=[*(pytest.param(s, marks=pytest.mark.bucket) for s in ("gs", "s3")), "folder"]
)
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    if request.param != "folder":
        return open_bucket(
            request.getfixturevalue(f"{request.param}_emulator").url + "/some/prefix"
        )
    folder = tmp_path / "bucket"
    folder.mkdir()
    return DirectoryBucket(folder)


def names(bucket: Bucket, prefix: str = "") -> list[str]:
    return [blob.name for blob in bucket.list(prefix)]


def test_objects_are_listed_by_name_with_their_sizes_below_a_prefix(bucket: Bucket) -> None:
    assert names(bucket) == []
    for name in ("b/two", "b.x", "a", "b-1", "b/deep/er"):
        bucket.write(name, name.encode())
    listed = list(bucket.list())
    assert [blob.name for blob in listed] == ["a", "b-1", "b.x", "b/deep/er", "b/two"]
    assert [blob.size for blob in listed] == [1, 3, 3, 9, 5]
    assert [with_checksum(bucket, blob) for blob in listed] == [bucket.info(b.name) for b in listed]
    assert names(bucket, "b") == ["b-1", "b.x", "b/deep/er", "b/two"]  # plain text
    assert names(bucket, "b/") == ["b/deep/er", "b/two"]
    assert names(bucket, "nothing/here") == []
    assert names(bucket, "a/x/") == []  # below an object


def test_objects_are_read_whole_and_in_ranges(bucket: Bucket) -> None:
    bucket.write("numbers", bytes(range(100)))
    assert bucket.read("numbers") == bytes(range(100))
    assert bucket.read("numbers", start=10, length=5) == bytes(range(10, 15))
    assert bucket.read("numbers", start=95) == bytes(range(95, 100))
    assert bucket.read("numbers", start=95, length=50) == bytes(range(95, 100))
    assert bucket.read("numbers", start=3, length=0) == b""


def test_an_absent_or_deleted_object_has_no_info_and_can_be_deleted(bucket: Bucket) -> None:
    bucket.write("folder/x", b"1")
    bucket.delete("folder/x")
    assert bucket.info("folder/x") is None
    assert names(bucket) == []
    with pytest.raises(BucketError, match="no such object"):
        bucket.read("folder/x")
    bucket.delete("folder/x")


@pytest.mark.parametrize("content", [bytes(range(256)) * 500, b""])
def test_a_file_is_the_same_after_an_upload_and_a_download(
    bucket: Bucket, tmp_path: Path, content: bytes
) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(content)
    stored = bucket.upload(source, "nested/folders/x.bin")
    assert stored == bucket.info("nested/folders/x.bin")
    target = tmp_path / "down/here/x.bin"
    assert bucket.download(stored, target) == crc32c_of(source)
    assert target.read_bytes() == content
    assert list(target.parent.iterdir()) == [target]


def test_storing_the_same_bytes_again_succeeds_and_other_bytes_are_refused(
    bucket: Bucket, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"one")
    bucket.write("x", b"one")
    bucket.write("x", b"one")
    bucket.upload(source, "x")
    bucket.upload(source, "x", crc32c=crc32c_of(source))
    source.write_bytes(b"two")
    for store in (lambda: bucket.write("x", b"two"), lambda: bucket.upload(source, "x")):
        with pytest.raises(BucketError, match="already holds other bytes"):
            store()
    assert bucket.read("x") == b"one"
    bucket.write("x", b"three", overwrite=True)
    assert bucket.read("x") == b"three"


def test_a_missing_file_or_one_with_another_checksum_is_not_stored(
    bucket: Bucket, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(b"damaged")
    with pytest.raises(BucketError, match="expected"):
        bucket.upload(tmp_path / "source", "x", crc32c=1234)
    with pytest.raises(BucketError, match=r"absent\.bin: No such file"):
        bucket.upload(tmp_path / "absent.bin", "x")
    assert names(bucket) == []


def test_a_download_of_other_bytes_or_onto_a_full_disk_leaves_no_file(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = bucket.write("x", b"content")
    with pytest.raises(BucketError, match="0x000004d2 expected"):
        bucket.download(dataclasses.replace(stored, crc32c=1234), tmp_path / "down/x")
    assert list((tmp_path / "down").iterdir()) == []
    monkeypatch.setattr("refocused.bucket.partial_files.free_bytes", lambda _: 6)
    with pytest.raises(BucketError, match=r"No space left in .*down: 7 bytes needed, 6 free"):
        bucket.download(stored, tmp_path / "down/x")
    assert not (tmp_path / "down/x").exists()


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb", "\x9b", "\ud800"])
def test_names_with_control_characters_are_refused_and_printed_escaped(
    bucket: Bucket, name: str
) -> None:
    with pytest.raises(BucketError, match="contains control characters or lone surr") as raised:
        bucket.info(name)
    assert all(character.isprintable() for character in str(raised.value))


@pytest.mark.parametrize("name", ["../x", "/x", "a\\b", "a/../../x", "", "c:/x", "a/./b", "//x"])
def test_names_that_leave_the_folder_are_refused(bucket: Bucket, tmp_path: Path, name: str) -> None:
    (tmp_path / "source").write_bytes(b"x")
    for call in (
        lambda: bucket.write(name, b"x"),
        lambda: bucket.upload(tmp_path / "source", name),
        lambda: bucket.download(BlobInfo(name=name, size=1, crc32c=1), tmp_path / "down"),
        lambda: bucket.read(name),
        lambda: bucket.delete(name),
    ):
        with pytest.raises(BucketError, match="outside its folder"):
            call()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["source"]


def test_an_address_opens_a_bucket_or_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = open_bucket("gs://some-bucket/a/prefix/")
    assert isinstance(bucket, Store) and bucket.url == "gs://some-bucket/a/prefix"
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in (str(tmp_path / "x"), "~/x"):
        bucket = open_bucket(url)
        assert isinstance(bucket, DirectoryBucket) and bucket.url == str(tmp_path / "x")
    for url in ("az://bucket/x", "file:///x", "gs:/b/x", " "):
        with pytest.raises(BucketError, match=r"Supported are gs://bucket/prefix"):
            open_bucket(url)
    with pytest.raises(ConfigError, match="there is no such user"):
        open_bucket("~no-such-user/x")
    for url in ("gs://", "s3://x", "gs://YOUR-BUCKET/tokens", "gs://a/b", "gs://bu cket"):
        with pytest.raises(BucketError, match="is not the address of a bucket"):
            open_bucket(url)


def test_the_import_loads_neither_google_cloud_nor_requests() -> None:
    check = (
        "import sys, refocused.bucket.open_bucket, refocused.bucket.transfer;"
        "print([m for m in ('google.cloud.storage', 'google.auth', 'requests', 'urllib3', 'torch')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
