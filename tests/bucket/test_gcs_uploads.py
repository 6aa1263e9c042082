"""Uploads to Google Cloud Storage store exactly the file's bytes, or raise an error."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import GARBLED, ON_GS, Emulator, Fault, Request

from refocused.bucket.store import Store
from refocused.system.errors import BucketError

pytestmark = pytest.mark.bucket

IS_UPLOAD: Callable[[Request], bool] = lambda request: request.is_upload  # noqa: E731


def begins_at(request: Request, offset: str) -> bool:
    return request.headers.get("Content-Range", "").startswith(f"bytes {offset}-")


def is_second_chunk(request: Request) -> bool:
    return begins_at(request, "16777216")


def is_session(request: Request) -> bool:
    return request.query.get("uploadType") == "resumable" and not request.is_chunk


def chunk_starts(emulator: Emulator) -> list[str]:
    """Offset of each chunk that was sent; `*` for a query of the state."""
    return [
        request.headers["Content-Range"].removeprefix("bytes ").partition("-")[0].partition("/")[0]
        for request in emulator.proxy.requests
        if request.is_chunk
    ]


def chunk_sizes(emulator: Emulator) -> list[int]:
    """Bytes of each chunk that was sent, without queries."""
    return [len(r.body) for r in emulator.proxy.requests if r.is_chunk and r.body]


@pytest.mark.parametrize(
    "fault", [Fault(lose_reply=True), Fault(reply=GARBLED), Fault(reply=b"{}")]
)
@pytest.mark.parametrize("file", ["small", "large"])
def test_a_lost_response_does_not_fail_the_upload(
    emulator: Emulator, gcs: Store, file: str, fault: Fault, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(file)
    emulator.proxy.script(
        IS_UPLOAD if file == "small" else (lambda request: begins_at(request, "33554432")), fault
    )
    assert gcs.upload(source, "x") == gcs.info("x")
    assert gcs.read("x") == source.read_bytes()


def test_other_bytes_already_there_are_named_and_kept(
    emulator: Emulator, gcs: Store, small: Path
) -> None:
    emulator.put("some/prefix/x", b"theirs")
    with pytest.raises(BucketError, match=r"some/prefix/x already holds other bytes: 6 bytes"):
        gcs.upload(small, "x")
    assert gcs.read("x") == b"theirs"


def test_the_store_refuses_a_file_that_differs_from_its_checksum(gcs: Store, large: Path) -> None:
    with pytest.raises(BucketError, match="HTTP 400"):
        gcs.upload(large, "x", crc32c=1234)
    assert gcs.info("x") is None


def test_bytes_damaged_in_transit_are_sent_again(
    emulator: Emulator, gcs: Store, small: Path
) -> None:
    emulator.proxy.script(IS_UPLOAD, Fault(status=400, message="Provided CRC32C doesn't match"))
    assert gcs.upload(small, "x").size == 1000


@ON_GS
@pytest.mark.parametrize("file", ["small", "large"])
def test_an_upload_needs_no_request_for_its_description(
    emulator: Emulator, gcs: Store, file: str, request: pytest.FixtureRequest
) -> None:
    stored = gcs.upload(request.getfixturevalue(file), "x")
    assert not any(asked.method == "GET" for asked in emulator.proxy.requests)
    first = emulator.proxy.requests[0]
    assert "application/octet-stream" in f"{first.headers} {first.body[:1000]!r}"
    assert stored == gcs.info("x")
    assert chunk_starts(emulator) in ([], ["0", "16777216", "33554432"])


@ON_GS
@pytest.mark.parametrize(
    ("fault", "starts"),
    [
        # After a failed chunk, smaller ones follow from what the store holds.
        (Fault(status=503), ["0", "16777216", "*", "16777216", "20971520"]),
        # A chunk whose response was lost is not sent twice.
        (Fault(lose_reply=True), ["0", "16777216", "*", "33554432"]),
    ],
)
def test_a_large_upload_continues_from_what_the_store_holds(
    emulator: Emulator, gcs: Store, large: Path, fault: Fault, starts: list[str]
) -> None:
    emulator.proxy.script(is_second_chunk, fault)
    assert gcs.upload(large, "x").size == 40 * 1024 * 1024
    assert chunk_starts(emulator)[: len(starts)] == starts


@ON_GS
@pytest.mark.parametrize("longest", [256 * 1024, 3_000_000])
def test_chunks_shrink_until_they_are_kept(
    emulator: Emulator, gcs: Store, large: Path, longest: int
) -> None:
    is_cut = lambda request: request.is_chunk and len(request.body) > longest  # noqa: E731
    emulator.proxy.script(is_cut, Fault(lose_request=True), times=10**6)  # and nothing is kept
    assert gcs.upload(large, "x").size == 40 * 1024 * 1024
    kept = [size for size in chunk_sizes(emulator) if size <= longest]
    assert sum(kept) == 40 * 1024 * 1024
    cut = len(chunk_sizes(emulator)) - len(kept)
    assert 0 < cut <= 3 + len(kept) / 4
    assert all(size % (256 * 1024) == 0 for size in kept)


@ON_GS
def test_chunks_grow_again_after_a_cut(emulator: Emulator, gcs: Store, large: Path) -> None:
    emulator.proxy.script(lambda request: request.is_chunk, Fault(lose_request=True), times=1)
    gcs.upload(large, "x")
    mebibytes = [size // 2**20 for size in chunk_sizes(emulator)]
    assert mebibytes == [16, 4, 4, 4, 4, 8, 8, 8]


@ON_GS
@pytest.mark.parametrize("held", ["bytes=0-x", "bytes=0-99999999999", "0", "bytes=0-" + "9" * 5000])
def test_an_invalid_range_header_makes_the_upload_query_the_state(
    emulator: Emulator, gcs: Store, large: Path, held: str
) -> None:
    emulator.proxy.script(is_second_chunk, Fault(status=308, headers={"Range": held}))
    assert gcs.upload(large, "x").size == 40 * 1024 * 1024


@ON_GS
@pytest.mark.parametrize("status", [404, 410])
def test_a_forgotten_session_is_replaced(
    emulator: Emulator, gcs: Store, large: Path, status: int
) -> None:
    emulator.proxy.script(is_second_chunk, Fault(status=status))
    gcs.upload(large, "x")
    assert chunk_starts(emulator) == ["0", "16777216", "0", "16777216", "33554432"]
    assert sum(is_session(request) for request in emulator.proxy.requests) == 2
    emulator.proxy.script(is_second_chunk, Fault(status=status), times=100)
    with pytest.raises(BucketError, match=rf"y: HTTP {status}.*gave up after 4 attempts"):
        gcs.upload(large, "y")


def test_a_file_truncated_during_its_upload_is_named(
    emulator: Emulator, gcs: Store, large: Path, tmp_path: Path
) -> None:
    source = tmp_path / "changing.bin"
    source.write_bytes(large.read_bytes())
    cut = lambda request: request.is_chunk and bool(os.truncate(source, 20_000_000))  # noqa: E731
    emulator.proxy.script(cut, Fault())
    with pytest.raises(BucketError, match=r"ends at 20,000,000 bytes, 41,943,040 expected"):
        gcs.upload(source, "x")
