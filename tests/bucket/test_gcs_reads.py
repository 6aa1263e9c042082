"""Downloads, reads and listings of Google Cloud Storage are complete and correct."""

import dataclasses
from pathlib import Path

import pytest
from fakes import ON_GS, Emulator, Fault, Request

from refocused.bucket.bucket import BlobInfo, extended_crc32c, stored_crc32c, with_checksum
from refocused.bucket.partial_files import PartFile, part_path
from refocused.bucket.retry import RefusedRequestError
from refocused.bucket.store import Store
from refocused.prepare.texts.text_inputs import RemoteText
from refocused.system.errors import BucketError, CorruptObjectError

pytestmark = pytest.mark.bucket

CONTENT = bytes(range(256)) * 4096  # 1 MiB
CUT = Fault(cut_after=300_000)
NO_CRC = frozenset({"crc32c"})


@dataclasses.dataclass
class Remote:
    """An object of `CONTENT` in a bucket, and the target of its download."""

    emulator: Emulator
    gcs: Store
    blob: BlobInfo
    target: Path

    def fails(self, fault: Fault, times: int = 1) -> None:
        self.emulator.proxy.script(lambda request: request.is_download, fault, times=times)

    def download(self, blob: BlobInfo | None = None) -> int:
        """Download the object; check that it is complete, with no other file beside it."""
        checksum = self.gcs.download(blob or self.blob, self.target)
        assert self.target.read_bytes() == CONTENT
        assert list(self.target.parent.iterdir()) == [self.target]
        return checksum

    @property
    def ranges(self) -> list[str | None]:
        """The Range headers of the downloads so far."""
        return [
            next((v for k, v in request.headers.items() if k.lower() == "range"), None)
            for request in self.emulator.proxy.requests
            if request.is_download
        ]


@pytest.fixture
def remote(emulator: Emulator, gcs: Store, tmp_path: Path) -> Remote:
    emulator.put("some/prefix/shard.bin", CONTENT)
    blob = gcs.info("shard.bin")
    assert blob is not None
    return Remote(emulator, gcs, blob, tmp_path / "down" / "x")


@pytest.mark.parametrize(
    ("faults", "requests"),
    [
        ([Fault(flip_byte=1000)] * 2, 3),
        ([Fault(flip_byte=1000, strip_headers=frozenset({"x-goog-hash"}))], 2),
        ([CUT, Fault(flip_byte=7)], 3),  # what comes after the cut is corrupt
        ([Fault(flip_byte=7, cut_after=300_000)], 3),  # what came before it
    ],
)
def test_a_corrupt_download_is_repeated(remote: Remote, faults: list[Fault], requests: int) -> None:
    for fault in faults:
        remote.fails(fault)
    remote.download()
    assert len(remote.ranges) == requests


def test_an_interrupted_download_is_resumed(remote: Remote) -> None:
    remote.fails(CUT)
    assert remote.download() == remote.blob.crc32c
    first, second = remote.ranges
    assert first is None and second is not None
    assert 0 < int(second.removeprefix("bytes=").removesuffix("-")) <= 300_000


@pytest.mark.parametrize(
    ("left", "asked"),
    [
        (CONTENT[:400_000], ["bytes=400000-"]),
        (CONTENT, []),  # only needs renaming
        (b"garbage", ["bytes=7-", None]),
        (CONTENT + b"more", [None]),
    ],
)
def test_an_earlier_process_is_continued_unless_its_file_is_foreign(
    remote: Remote, left: bytes, asked: list[str | None]
) -> None:
    remote.target.parent.mkdir()
    part_path(remote.target).write_bytes(left)
    remote.download()
    assert remote.ranges == asked


def test_a_permanently_corrupt_object_is_named_with_both_checksums(remote: Remote) -> None:
    remote.fails(Fault(flip_byte=0), times=100)
    corrupt = extended_crc32c(0, b"\xff" + CONTENT[1:])
    text = rf"shard.bin: .*crc32c {corrupt:#010x} received 4 ti.*{remote.blob.crc32c:#x} expected"
    with pytest.raises(CorruptObjectError, match=text):
        remote.download()
    assert len(remote.ranges) == 4
    assert list(remote.target.parent.iterdir()) == []


def test_progress_resets_the_attempts(remote: Remote, waits: list[float]) -> None:
    remote.fails(Fault(cut_after=100_000), times=8)
    remote.download()
    assert waits == [0.5] * 8


def test_faults_without_progress_fail_the_download_and_keep_the_received_bytes(
    remote: Remote,
) -> None:
    remote.fails(CUT)
    remote.fails(Fault(status=503), times=100)
    with pytest.raises(BucketError, match=r"HTTP 503.*gave up after 4 attempts"):
        remote.download()
    assert part_path(remote.target).stat().st_size > 0
    assert not remote.target.exists()


@pytest.mark.parametrize("unlisted", [frozenset(), NO_CRC])
def test_an_object_replaced_since_it_was_listed_is_not_taken_for_the_old_one(
    remote: Remote, unlisted: frozenset[str]
) -> None:
    remote.emulator.proxy.unlisted = unlisted
    [listed] = remote.gcs.list()
    remote.emulator.put("some/prefix/shard.bin", CONTENT[::-1])
    with pytest.raises(BucketError, match=r"shard\.bin: HTTP 4(04|12).*replaced after it was"):
        remote.download(listed)


def test_an_object_overwritten_between_description_and_read_is_read_again(remote: Remote) -> None:
    overwrites = iter(range(1))

    def overwrite(request: Request) -> bool:
        if request.is_download and (number := next(overwrites, None)) is not None:
            remote.emulator.put("some/prefix/shard.bin", b"new" * (1 + number))
        return False

    remote.emulator.proxy.script(overwrite, Fault())
    assert remote.gcs.read("shard.bin") == b"new"
    overwrites = iter(range(1, 100))  # other bytes each time
    with pytest.raises(BucketError, match=r"shard\.bin: HTTP 4(04|12)"):
        remote.gcs.read("shard.bin")


@pytest.mark.parametrize(
    ("fault", "start", "length", "repeated"),
    [
        (Fault(flip_byte=5), 0, None, True),  # only a whole object is verified
        (Fault(status=416), len(CONTENT), None, False),  # which the emulator does not send
        (Fault(status=200), 5, 10, True),  # the range was ignored
        (Fault(answered_as=200, headers={"Content-Range": "bytes 5-14/1048576"}), 5, 10, False),
        (CUT, 5, 500_000, True),
    ],
)
def test_a_read_returns_the_requested_bytes(
    remote: Remote, fault: Fault, start: int, length: int | None, repeated: bool
) -> None:
    remote.fails(fault)
    wanted = CONTENT[start:] if length is None else CONTENT[start : start + length]
    assert remote.gcs.read("shard.bin", start=start, length=length) == wanted
    assert len(remote.ranges) == 1 + repeated


@pytest.mark.parametrize(
    "range_", ["bytes 0-9/1048576", "bytes 5-", "pages 5-14/99", "bytes x-y/z"]
)
def test_a_response_with_another_range_is_discarded(
    remote: Remote, waits: list[float], range_: str
) -> None:
    remote.fails(Fault(reply=b"0123456789", headers={"Content-Range": range_}))
    assert remote.gcs.read("shard.bin", start=5, length=10) == CONTENT[5:15]
    assert waits == [0.5]


def test_no_more_than_the_listed_bytes_are_written(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    really_write = PartFile.write

    def write(part: PartFile, content: bytes) -> None:
        really_write(part, content)
        sizes.append(part.size)

    monkeypatch.setattr(PartFile, "write", write)
    remote.fails(Fault(reply=b"x" * 9_000_000), times=100)
    with pytest.raises(
        BucketError, match=r"n: 1,048,577 bytes, .*received 4 times.* 1,048,576 bytes"
    ) as raised:
        remote.download()
    assert not isinstance(raised.value, CorruptObjectError)  # what a proxy's page looks like
    assert max(sizes) == len(CONTENT) + 1
    assert list(remote.target.parent.iterdir()) == []
    with pytest.raises(BucketError, match=r"the response has more bytes than were requested"):
        remote.gcs.read("shard.bin", start=0, length=10)


def test_a_listing_reads_all_pages(emulator: Emulator, gcs: Store) -> None:
    names = [f"part_{number:05d}" for number in range(205)]
    for name in reversed(names):
        emulator.put(f"some/prefix/{name}", b"1")
    for name in ("some/prefix/", "some/prefix/part_/", "some/prefix2/part_x"):  # no objects of it
        emulator.put(name, b"")
    emulator.proxy.page_limit = 100
    assert [blob.name for blob in gcs.list("part_")] == names
    assert sum(request.is_listing for request in emulator.proxy.requests) == 3
    assert [blob.name for blob in gcs.list()] == names


def test_a_fault_in_a_later_page_repeats_only_that_page(emulator: Emulator, gcs: Store) -> None:
    for number in range(5):
        emulator.put(f"some/prefix/{number}", b"1")
    emulator.proxy.page_limit = 2
    emulator.proxy.script(
        lambda request: request.is_listing and request.page_token is not None, Fault(cut_after=20)
    )
    assert [blob.name for blob in gcs.list()] == ["0", "1", "2", "3", "4"]
    first, second, again, third = [r.page_token for r in emulator.proxy.requests if r.is_listing]
    assert first is None and second == again != third and None not in (second, third)


def test_checksums_missing_from_a_listing_come_from_the_objects_themselves(
    remote: Remote, waits: list[float]
) -> None:
    remote.emulator.proxy.unlisted = NO_CRC  # as in a bucket with customer-managed keys
    [listed] = remote.gcs.list()
    assert listed == dataclasses.replace(remote.blob, crc32c=None)
    assert with_checksum(remote.gcs, listed) == remote.blob
    remote.fails(Fault(flip_byte=5))
    assert remote.download(listed) == remote.blob.crc32c
    assert waits == []


def test_an_object_without_any_checksum_is_read_and_hashed(
    remote: Remote, small: Path, tmp_path: Path
) -> None:
    remote.emulator.proxy.undescribed = NO_CRC
    [listed] = remote.gcs.list()
    assert remote.download(listed) == remote.blob.crc32c
    assert remote.gcs.read("shard.bin") == CONTENT
    assert stored_crc32c(remote.gcs, listed) == remote.blob.crc32c
    remote.gcs.upload(small, "new")
    remote.gcs.upload(small, "new")
    other = tmp_path / "other"
    other.write_bytes(b"x" * small.stat().st_size)
    with pytest.raises(BucketError, match=r"new already holds other bytes"):
        remote.gcs.upload(other, "new")


@ON_GS
def test_an_object_without_a_size_is_described_again_and_then_named(
    remote: Remote, waits: list[float]
) -> None:
    remote.emulator.put("some/prefix/other.bin", CONTENT)
    remote.emulator.proxy.unlisted = frozenset({"size"})
    assert [blob.size for blob in remote.gcs.list()] == [len(CONTENT)] * 2
    remote.emulator.proxy.undescribed = frozenset({"size"})
    for listed in remote.gcs.list():
        with pytest.raises(BucketError, match=rf"{listed.name}: .* no size"):
            _ = listed.size
    assert waits == []


@ON_GS
def test_an_entry_without_a_name_is_named_by_its_place(
    emulator: Emulator, gcs: Store, waits: list[float]
) -> None:
    reply = b'{"items": [{"name": "some/prefix/a"}, {"size": "12345"}]}'
    emulator.proxy.script(lambda request: request.is_listing, Fault(reply=reply), times=100)
    with pytest.raises(
        BucketError, match=r"an entry without a name of this prefix, after .*prefix/a.*12345"
    ):
        list(gcs.list())
    assert waits == [0.5]


@ON_GS
def test_a_listing_of_another_prefix_is_requested_again(
    emulator: Emulator, gcs: Store, waits: list[float]
) -> None:
    emulator.put("some/prefix/a/x", b"1")
    reply = b'{"items": [{"name": "some/prefix/b/x", "size": "1", "generation": "1"}]}'
    emulator.proxy.script(lambda request: request.is_listing, Fault(reply=reply))
    assert [blob.name for blob in gcs.list("a/")] == ["a/x"]
    assert waits == [0.5]


def test_an_object_that_the_store_keeps_compressed_is_refused(remote: Remote) -> None:
    remote.fails(Fault(headers={"Content-Encoding": "gzip"}), times=9)
    said = r"shard\.bin: it is stored with Content-Encoding: gzip, so its bytes are compressed"
    for read in (
        remote.download,
        lambda: remote.gcs.read("shard.bin"),
        lambda: remote.gcs.read("shard.bin", start=5, length=9),
    ):
        with pytest.raises(RefusedRequestError, match=said):
            read()
    assert not remote.target.exists()
    remote.emulator.put("some/prefix/a.jsonl.gz", CONTENT)  # its name says so
    assert remote.gcs.read("a.jsonl.gz") == CONTENT
    place = remote.emulator.url, "some/prefix/shard.bin", len(CONTENT), remote.blob.generation or ""
    assert RemoteText(*place).read(0, 9) == CONTENT[:9]  # texts are unpacked by their readers
