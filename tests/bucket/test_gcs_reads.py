from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import Emulator, Fault, Request

from refocused.bucket.bucket import BlobInfo, crc32c_of
from refocused.bucket.gcs import GcsBucket
from refocused.bucket.partial_files import PartFile, part_path
from refocused.bucket.stored import stored_crc32c, with_checksum
from refocused.system.errors import BucketError

pytestmark = pytest.mark.bucket

CONTENT = bytes(range(256)) * 4096  # 1 MiB
IS_DOWNLOAD: Callable[[Request], bool] = lambda request: request.is_download  # noqa: E731


@pytest.fixture
def stored(emulator: Emulator, gcs: GcsBucket) -> BlobInfo:
    emulator.put("some/prefix/shard.bin", CONTENT)
    (blob,) = gcs.list()
    return blob


def ranges(emulator: Emulator) -> list[str | None]:
    """The Range headers of the downloads so far."""
    return [
        next((v for k, v in request.headers.items() if k.lower() == "range"), None)
        for request in emulator.proxy.requests
        if request.is_download
    ]


def assert_whole(target: Path) -> None:
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == [target.name]


CUT = Fault(cut_after=300_000)


@pytest.mark.parametrize(
    ("faults", "requests"),
    [
        ([Fault(flip_byte=1000)] * 2, 3),
        ([Fault(flip_byte=1000, strip_headers=frozenset({"x-goog-hash"}))], 2),
        ([CUT, Fault(flip_byte=7)], 3),  # what comes after the cut is corrupt
        ([Fault(flip_byte=7, cut_after=300_000)], 3),  # what came before it
    ],
)
def test_corruption_is_found_and_the_object_fetched_afresh(
    emulator: Emulator,
    gcs: GcsBucket,
    stored: BlobInfo,
    tmp_path: Path,
    faults: list[Fault],
    requests: int,
) -> None:
    for fault in faults:
        emulator.proxy.script(IS_DOWNLOAD, fault)
    gcs.download(stored, tmp_path / "down" / "x")
    assert_whole(tmp_path / "down" / "x")
    assert len(ranges(emulator)) == requests


def test_a_cut_download_is_resumed_where_it_ended(
    emulator: Emulator, gcs: GcsBucket, stored: BlobInfo, tmp_path: Path
) -> None:
    emulator.proxy.script(IS_DOWNLOAD, Fault(cut_after=300_000))
    assert gcs.download(stored, tmp_path / "down" / "x") == stored.crc32c
    assert_whole(tmp_path / "down" / "x")
    first, second = ranges(emulator)
    assert first is None
    assert second is not None
    start = int(second.removeprefix("bytes=").removesuffix("-"))
    assert 0 < start <= 300_000


@pytest.mark.parametrize(
    ("left", "asked"),
    [
        (CONTENT[:400_000], ["bytes=400000-"]),
        (CONTENT, []),  # only needs its name
        (b"garbage", ["bytes=7-", None]),
        (CONTENT + b"more", [None]),
    ],
)
def test_what_an_earlier_process_received_is_kept_unless_it_is_foreign(
    emulator: Emulator,
    gcs: GcsBucket,
    stored: BlobInfo,
    tmp_path: Path,
    left: bytes,
    asked: list[str | None],
) -> None:
    (tmp_path / "down").mkdir()
    part_path(tmp_path / "down" / "x").write_bytes(left)
    gcs.download(stored, tmp_path / "down" / "x")
    assert_whole(tmp_path / "down" / "x")
    assert ranges(emulator) == asked


def test_an_object_corrupt_for_good_is_named_with_both_checksums(
    emulator: Emulator, gcs: GcsBucket, stored: BlobInfo, tmp_path: Path
) -> None:
    emulator.proxy.script(IS_DOWNLOAD, Fault(flip_byte=0), times=100)
    with pytest.raises(BucketError) as raised:
        gcs.download(stored, tmp_path / "down" / "x")
    corrupt = tmp_path / "corrupt"
    corrupt.write_bytes(b"\xff" + CONTENT[1:])
    assert f"{emulator.url}/some/prefix/shard.bin" in str(raised.value)
    assert f"{stored.crc32c:#010x} expected" in str(raised.value)
    assert f"{crc32c_of(corrupt):#010x} received 4 times" in str(raised.value)
    assert len(ranges(emulator)) == 4
    assert list((tmp_path / "down").iterdir()) == []


def test_progress_renews_the_attempts(
    emulator: Emulator, gcs: GcsBucket, stored: BlobInfo, tmp_path: Path, waits: list[float]
) -> None:
    emulator.proxy.script(IS_DOWNLOAD, Fault(cut_after=100_000), times=8)
    gcs.download(stored, tmp_path / "down" / "x")
    assert_whole(tmp_path / "down" / "x")
    assert waits == [0.5] * 8


def test_faults_without_progress_end_after_the_attempts_and_keep_what_arrived(
    emulator: Emulator, gcs: GcsBucket, stored: BlobInfo, tmp_path: Path
) -> None:
    emulator.proxy.script(IS_DOWNLOAD, Fault(cut_after=300_000))
    emulator.proxy.script(IS_DOWNLOAD, Fault(status=503), times=100)
    with pytest.raises(BucketError, match=r"HTTP 503.*given up after 4 attempts"):
        gcs.download(stored, tmp_path / "x")
    assert part_path(tmp_path / "x").stat().st_size > 0
    assert not (tmp_path / "x").exists()


def test_an_object_replaced_since_it_was_listed_is_not_taken_for_the_old_one(
    emulator: Emulator, gcs: GcsBucket, stored: BlobInfo, tmp_path: Path
) -> None:
    emulator.put("some/prefix/shard.bin", b"other")
    with pytest.raises(BucketError, match=r"shard\.bin: HTTP 404.*replaced after it was listed"):
        gcs.download(stored, tmp_path / "x")


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    emulator: Emulator,
    gcs: GcsBucket,
    stored: BlobInfo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("refocused.bucket.partial_files.free_bytes", lambda _: 1000)
    with pytest.raises(BucketError, match=r"No space left.*1,048,576 bytes needed, 1,000 free"):
        gcs.download(stored, tmp_path / "x")
    assert ranges(emulator) == []


@pytest.mark.parametrize(
    ("fault", "start", "length", "repeated"),
    [
        (Fault(flip_byte=5), 0, None, True),  # its corruption shows in the whole object alone
        (Fault(status=416), len(CONTENT), None, False),  # which the emulator does not answer
        (Fault(status=200), 5, 10, True),  # the range was not heeded
        (
            Fault(answered_as=200, headers={"Content-Range": f"bytes 5-14/{len(CONTENT)}"}),
            5,
            10,
            False,
        ),
        (CUT, 5, 500_000, True),
    ],
)
def test_a_read_returns_the_bytes_that_were_asked_for(
    emulator: Emulator,
    gcs: GcsBucket,
    stored: BlobInfo,
    fault: Fault,
    start: int,
    length: int | None,
    repeated: bool,
) -> None:
    emulator.proxy.script(IS_DOWNLOAD, fault)
    wanted = CONTENT[start:] if length is None else CONTENT[start : start + length]
    assert gcs.read(stored.name, start=start, length=length) == wanted
    assert len(ranges(emulator)) == 1 + repeated


@pytest.mark.parametrize("told", ["bytes 0-9/1048576", "bytes 5-", "pages 5-14/99", "bytes x-y/z"])
def test_a_part_of_another_range_is_not_taken(
    emulator: Emulator, gcs: GcsBucket, stored: BlobInfo, waits: list[float], told: str
) -> None:
    wrong = Fault(reply=b"0123456789", headers={"Content-Range": told})
    emulator.proxy.script(IS_DOWNLOAD, wrong)
    assert gcs.read(stored.name, start=5, length=10) == CONTENT[5:15]
    assert waits == [0.5]


def test_no_more_than_the_listed_bytes_are_written(
    emulator: Emulator,
    gcs: GcsBucket,
    stored: BlobInfo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    really_write = PartFile.write

    def write(part: PartFile, content: bytes) -> None:
        really_write(part, content)
        sizes.append(part.size)

    monkeypatch.setattr(PartFile, "write", write)
    emulator.proxy.script(IS_DOWNLOAD, Fault(reply=b"x" * 9_000_000), times=100)
    with pytest.raises(BucketError, match=r"shard\.bin: .*more than the 1,048,576 bytes that were"):
        gcs.download(stored, tmp_path / "down" / "x")
    assert max(sizes) == len(CONTENT) + 1
    assert list((tmp_path / "down").iterdir()) == []
    with pytest.raises(BucketError, match=r"more bytes were answered than were asked for"):
        gcs.read(stored.name, start=0, length=10)


def test_a_listing_goes_over_all_pages(emulator: Emulator, gcs: GcsBucket) -> None:
    names = [f"part_{number:05d}" for number in range(2050)]
    for name in reversed(names):
        emulator.put(f"some/prefix/{name}", b"1")
    assert [blob.name for blob in gcs.list("part_")] == names
    assert sum(request.is_listing for request in emulator.proxy.requests) == 3


def test_a_fault_in_a_later_page_repeats_only_that_page(emulator: Emulator, gcs: GcsBucket) -> None:
    for number in range(5):
        emulator.put(f"some/prefix/{number}", b"1")
    emulator.proxy.page_limit = 2
    emulator.proxy.script(
        lambda request: request.is_listing and request.query.get("pageToken") == "2",
        Fault(cut_after=20),
    )
    assert [blob.name for blob in gcs.list()] == ["0", "1", "2", "3", "4"]
    tokens = [r.query.get("pageToken") for r in emulator.proxy.requests if r.is_listing]
    assert tokens == [None, "2", "2", "4"]


def test_folder_placeholders_and_objects_beside_the_prefix_are_not_listed(
    emulator: Emulator, gcs: GcsBucket
) -> None:
    for name in ("some/prefix/", "some/prefix/folder/", "some/prefix2/x", "some/prefix/x"):
        emulator.put(name, b"1")
    assert [blob.name for blob in gcs.list()] == ["x"]


def test_a_lost_answer_to_a_delete_is_fine(
    emulator: Emulator, gcs: GcsBucket, stored: BlobInfo
) -> None:
    emulator.proxy.script(lambda request: request.method == "DELETE", Fault(lose_reply=True))
    gcs.delete(stored.name)
    assert list(gcs.list()) == []


NO_CRC = frozenset({"crc32c"})


def test_a_listing_without_checksums_is_completed_by_the_objects_own_descriptions(
    emulator: Emulator, gcs: GcsBucket, stored: BlobInfo, waits: list[float], tmp_path: Path
) -> None:
    emulator.proxy.unlisted = NO_CRC  # as in a bucket with customer-managed keys
    (listed,) = gcs.list()
    assert listed == dataclasses.replace(stored, crc32c=None)
    assert with_checksum(gcs, listed) == stored
    emulator.proxy.script(IS_DOWNLOAD, Fault(flip_byte=5))
    assert gcs.download(listed, tmp_path / "down" / "x") == stored.crc32c
    assert_whole(tmp_path / "down" / "x")
    assert waits == []


def test_an_object_without_any_checksum_is_read_and_hashed(
    emulator: Emulator, gcs: GcsBucket, stored: BlobInfo, small: Path, tmp_path: Path
) -> None:
    emulator.proxy.undescribed = NO_CRC
    (listed,) = gcs.list()
    assert gcs.download(listed, tmp_path / "down" / "x") == stored.crc32c
    assert_whole(tmp_path / "down" / "x")
    assert gcs.read(stored.name) == CONTENT
    assert stored_crc32c(gcs, listed) == stored.crc32c
    gcs.upload(small, "new")
    gcs.upload(small, "new")
    other = tmp_path / "other"
    other.write_bytes(b"x" * small.stat().st_size)
    with pytest.raises(BucketError, match=r"new already holds other bytes"):
        gcs.upload(other, "new")


def test_an_object_replaced_since_a_listing_without_checksums_is_not_taken_for_the_old_one(
    emulator: Emulator, gcs: GcsBucket, stored: BlobInfo, tmp_path: Path
) -> None:
    emulator.proxy.unlisted = NO_CRC
    (listed,) = gcs.list()
    emulator.put("some/prefix/shard.bin", CONTENT[::-1])
    with pytest.raises(BucketError, match="replaced after it was listed"):
        gcs.download(listed, tmp_path / "x")


def test_a_listed_object_without_a_size_is_asked_about_and_named_when_it_has_none(
    emulator: Emulator, gcs: GcsBucket, stored: BlobInfo, waits: list[float]
) -> None:
    emulator.put("some/prefix/other.bin", CONTENT)
    emulator.proxy.unlisted = frozenset({"size"})
    assert [blob.size for blob in gcs.list()] == [len(CONTENT)] * 2
    emulator.proxy.undescribed = frozenset({"size"})
    with pytest.raises(BucketError, match=r"other\.bin: .* no size"):
        list(gcs.list())
    assert waits == []
