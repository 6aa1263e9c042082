"""What S3 does in another way than Google Cloud Storage, and its errors."""

import base64
import hashlib
import importlib.util
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import ON_S3, Emulator, Fault, Request
from s3_store import CHECKSUM, ENVIRONMENT, S3Emulator

from refocused.bucket.bucket import BlobInfo, is_stored, with_checksum
from refocused.bucket.open_bucket import open_bucket
from refocused.bucket.retry import Retry
from refocused.bucket.store import Store
from refocused.system.errors import BucketError, CorruptObjectError

pytestmark = [pytest.mark.bucket, ON_S3]

ANY: Callable[[Request], bool] = lambda request: True  # noqa: E731


def part_numbers(emulator: Emulator) -> list[str]:
    return [r.query["partNumber"] for r in emulator.proxy.requests if r.is_chunk]


@pytest.mark.parametrize(
    ("status", "message", "text"),
    [
        (403, "AccessDenied: no", "AWS credentials lack a permission.*s3:PutO"),
        (400, "ExpiredToken: old", "HTTP 400 ExpiredToken: old. .*The AWS.*were not accepted"),
        (403, "InvalidAccessKeyId: ?", "were not accepted"),
        (403, "RequestTimeTooSkewed: 16 min", "This machine's clock is wrong"),
        (404, "NoSuchBucket: none", "Check its name, and AWS_ENDPOINT_URL_S3"),
        (400, "AuthorizationHeaderMalformed: 'eu-west-3'", "eu-west-3.*set AWS_REGION"),
        (501, "NotImplemented: no", "will fail again; the store.s message says why"),
    ],
)
def test_a_permanent_fault_names_its_remedy_and_is_not_retried(
    emulator: Emulator, gcs: Store, waits: list[float], status: int, message: str, text: str
) -> None:
    emulator.proxy.script(ANY, Fault(status=status, message=message), times=100)
    calls = [lambda: gcs.info("x"), lambda: list(gcs.list()), lambda: gcs.write("x", b"1")]
    for call in calls[status == 404 :]:  # a HEAD does not say what is missing
        with pytest.raises(BucketError, match=text):
            call()
    assert waits == []


@pytest.mark.parametrize(
    "code", ["503 SlowDown", "500 Internal", "409 ConditionalRequestConflict", "400 RequestTimeout"]
)
def test_a_transient_fault_is_retried(
    emulator: Emulator, gcs: Store, waits: list[float], code: str
) -> None:
    fault = Fault(status=int(code[:3]), message=f"{code[4:]}: later")
    emulator.proxy.script(ANY, fault, times=2)
    assert gcs.write("x", b"1") == gcs.info("x")
    assert waits == [0.5, 1.0]


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(lose_reply=True)])
def test_only_the_failed_part_of_a_large_upload_is_repeated(
    emulator: Emulator, gcs: Store, large: Path, waits: list[float], fault: Fault
) -> None:
    emulator.proxy.script(lambda request: request.query.get("partNumber") == "2", fault)
    stored = gcs.upload(large, "x")
    assert part_numbers(emulator) == ["1", "2", "2", "3"]
    assert stored == gcs.info("x") and stored.crc32c is not None  # of the whole file
    gcs.upload(large, "x")
    assert len(part_numbers(emulator)) == 4


@pytest.mark.parametrize("status", [404, 400])
def test_a_forgotten_upload_or_a_damaged_part_begins_a_new_one(
    emulator: Emulator, gcs: Store, large: Path, status: int
) -> None:
    message = {404: "NoSuchUpload: gone", 400: "BadDigest: damaged"}[status]
    is_second: Callable[[Request], bool] = lambda r: r.query.get("partNumber") == "2"  # noqa: E731
    emulator.proxy.script(is_second, Fault(status=status, message=message))
    gcs.upload(large, "x")
    assert part_numbers(emulator) == ["1", "2", "1", "2", "3"]
    emulator.proxy.script(is_second, Fault(status=status, message=message), times=100)
    with pytest.raises(BucketError, match=message):
        gcs.upload(large, "y")
    aborted = [r for r in emulator.proxy.requests if r.method == "DELETE" and "uploadId" in r.query]
    assert len(aborted) == 5  # no parts are left to pay for


def test_a_store_without_checksums_of_whole_objects_is_not_read_after_an_upload(
    emulator: Emulator, gcs: Store, large: Path
) -> None:
    emulator.proxy.script(  # those of parts, as from a store without `ChecksumType`
        lambda request: request.method == "HEAD", Fault(headers={CHECKSUM: "AAAAAA==-3"}), times=10
    )
    stored = gcs.upload(large, "x")
    assert stored.crc32c is None
    assert not any(request.is_download for request in emulator.proxy.requests)
    assert not is_stored(gcs, "x", size=stored.size, crc32c=0)  # reads it


@pytest.mark.parametrize("size", [10, 2**25])
def test_what_a_store_that_returns_no_checksum_has_stored_is_read(
    emulator: Emulator, gcs: Store, tmp_path: Path, size: int
) -> None:
    emulator.proxy.undescribed = frozenset({"crc32c"})
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    gcs.upload(file, "x")
    assert any(request.is_download for request in emulator.proxy.requests)
    emulator.proxy.script(lambda request: request.is_download, Fault(flip_byte=7), times=100)
    with pytest.raises(BucketError, match="already holds other bytes"):
        gcs.upload(file, "y")


def test_requests_are_anonymous_without_credentials(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    emulator.proxy.script(ANY, Fault(status=403), times=2)  # a login is looked for once more
    with pytest.raises(BucketError, match=r"or log in .aws configure"):
        list(open_bucket(emulator.url).list())
    assert list(open_bucket(emulator.url).list()) == []
    assert not any("Authorization" in request.headers for request in emulator.proxy.requests)


def test_unusable_settings_are_an_error(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(BucketError, match=r"s3://.*The config profile .absent. could not be found"):
        open_bucket(emulator.url).info("x")


def test_a_missing_package_is_named(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BucketError, match=r"the package boto3: .*pip install"):
        open_bucket(emulator.url, retry=Retry())


OTHERS = b"written by another tool"
CRC32 = base64.b64encode(zlib.crc32(OTHERS).to_bytes(4, "big")).decode()
MD5 = f"etag {hashlib.md5(OTHERS).hexdigest()}"
SHA256 = base64.b64encode(hashlib.sha256(OTHERS).digest()).decode()


@pytest.mark.parametrize(
    ("headers", "checksum"),
    [
        ({}, MD5),
        ({"x-amz-checksum-crc32": CRC32}, f"crc32 {zlib.crc32(OTHERS):08x}"),
        ({"x-amz-checksum-sha256": SHA256}, f"sha256 {hashlib.sha256(OTHERS).hexdigest()}"),
        ({"x-amz-checksum-crc32": f"{CRC32}-3"}, MD5),  # of the checksums of three parts
        ({"x-amz-checksum-crc32": CRC32, "x-amz-checksum-type": "COMPOSITE"}, MD5),
        ({"x-amz-checksum-crc32": "?"}, MD5),
        ({"x-amz-server-side-encryption": "AES256"}, MD5),
        ({"x-amz-server-side-encryption": "aws:kms"}, ""),  # whose ETags are none
        ({"x-amz-server-side-encryption": "aws:kms:dsse"}, ""),
        ({"x-amz-server-side-encryption-customer-algorithm": "AES256"}, ""),
        ({"Etag": f'"{MD5[4:]}-2"'}, ""),
    ],
)
def test_objects_of_other_tools_are_verified_by_the_checksum_that_they_have(
    emulator: S3Emulator, gcs: Store, tmp_path: Path, headers: dict[str, str], checksum: str
) -> None:
    emulator.put("some/prefix/x", OTHERS, algorithm=None)
    emulator.proxy.script(lambda r: r.method == "HEAD", Fault(headers=headers), times=100)
    [listed] = gcs.list()
    # The generation of a listing is that of the true ETag.
    found = with_checksum(gcs, BlobInfo(listed.name, listed.size))
    assert (found.crc32c, found.checksum) == (None, checksum)
    found = with_checksum(gcs, found)  # not described again
    assert sum(request.method == "HEAD" for request in emulator.proxy.requests) == 1
    if not checksum:
        return
    flipped = Fault(flip_byte=3)
    emulator.proxy.script(lambda r: r.is_download, flipped)
    gcs.download(found, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == OTHERS
    emulator.proxy.script(lambda r: r.is_download, flipped)
    assert gcs.read("x") == OTHERS
    emulator.proxy.script(lambda r: r.is_download, flipped, times=4)
    with pytest.raises(CorruptObjectError, match=rf"x: .*{checksum} expected"):
        gcs.download(found, tmp_path / "y")


def test_an_etag_that_is_no_md5_is_found_out_by_the_first_object(
    emulator: S3Emulator, gcs: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"Etag": '"0123456789abcdef0123456789abcdef"'}
    emulator.proxy.script(lambda r: r.method == "HEAD", Fault(headers=other), times=100)
    emulator.proxy.script(  # in spite of the condition on the true one
        lambda r: r.is_download,
        Fault(answered_as=206, reply=OTHERS, headers=other | {"Content-Range": "bytes 0-22/23"}),
        times=100,
    )
    for name in "xy":
        emulator.put(f"some/prefix/{name}", OTHERS, algorithm=None)
    found = gcs.info("x")
    assert found is not None
    gcs.download(found, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == gcs.read("y") == OTHERS
    assert [request.path[-1] for request in emulator.proxy.requests if request.is_download] == [
        "x",
        "x",
        "y",
    ]
    [record] = caplog.records
    assert "the ETags of this store are no MD5s" in record.getMessage()


def test_a_crc64nvme_is_compared_where_its_library_is_there(
    emulator: S3Emulator, gcs: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    crc = pytest.importorskip("awscrt.checksums").crc64nvme(OTHERS)
    assert pytest.importorskip("awscrt.checksums").crc64nvme(b"123456789") == 0xAE8B14860A799888
    text = base64.b64encode(crc.to_bytes(8, "big")).decode()
    headers = {"x-amz-checksum-crc64nvme": text, "x-amz-checksum-type": "FULL_OBJECT"}
    emulator.put("some/prefix/x", OTHERS, algorithm=None)
    emulator.proxy.script(lambda r: r.method == "HEAD", Fault(headers=headers), times=100)
    found = gcs.info("x")
    assert found is not None and found.checksum == f"crc64nvme {crc:016x}"
    emulator.proxy.script(lambda r: r.is_download, Fault(flip_byte=3))
    assert gcs.read("x") == OTHERS
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = gcs.info("x")
    assert found is not None and found.checksum == MD5


def test_renewed_credentials_are_read(
    emulator: Emulator, gcs: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def log_in(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")

    def is_old(request: Request) -> bool:
        return "Credential=OLD/" in request.headers.get("Authorization", "")

    log_in("OLD")
    gcs.write("x", b"1")
    emulator.proxy.script(is_old, Fault(status=400, message="ExpiredToken: old"), times=100)
    with pytest.raises(BucketError, match="were not accepted: they expired"):
        gcs.info("x")
    file.unlink()  # while it is being replaced
    with pytest.raises(BucketError, match="were not accepted: they expired"):
        gcs.info("x")
    log_in("NEW")
    assert gcs.info("x") is not None
    emulator.proxy.script(
        lambda request: "Credential=NEW/" in request.headers.get("Authorization", ""),
        Fault(status=403, message="ExpiredToken: old"),
        times=100,
    )
    log_in("NEWER")  # before a request is refused
    assert gcs.read("x") == b"1"


@pytest.mark.parametrize("size", [7_000_000, 40 * 1024 * 1024])
def test_parts_shrink_until_they_are_kept(
    emulator: Emulator, gcs: Store, tmp_path: Path, size: int
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    is_cut = lambda request: request.is_upload and len(request.body) > 6_000_000  # noqa: E731
    emulator.proxy.script(is_cut, Fault(lose_request=True), times=10**6)
    assert gcs.upload(file, "x").size == size
    kept = [len(r.body) for r in emulator.proxy.requests if r.is_chunk and not is_cut(r)]
    assert set(kept[:-1]) == {5 * 1024 * 1024} and sum(kept) == size  # R2: all of one length


def test_bytes_of_another_version_are_requested_again(
    emulator: Emulator, gcs: Store, waits: list[float]
) -> None:
    gcs.write("x", b"1")
    other = Fault(reply=b"2", headers={"Etag": '"0123456789abcdef0123456789abcdef"'})
    emulator.proxy.script(lambda request: request.is_download, other, times=2)
    assert gcs.read("x") == b"1"
    assert waits == [0.5, 1.0]
