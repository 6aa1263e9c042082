from __future__ import annotations

from pathlib import Path

import pytest
from fakes import Emulator, Fault, Request

from refocused.bucket.gcs import GcsBucket
from refocused.system.errors import BucketError

pytestmark = pytest.mark.bucket


def is_second_chunk(request: Request) -> bool:
    return request.headers.get("Content-Range", "").startswith("bytes 16777216-")


def is_last_chunk(request: Request) -> bool:
    return request.headers.get("Content-Range", "").startswith("bytes 33554432-")


def is_session(request: Request) -> bool:
    return request.query.get("uploadType") == "resumable" and not request.is_chunk


def chunk_starts(emulator: Emulator) -> list[str]:
    """Where each chunk that was sent began; `*` for a question."""
    return [
        request.headers["Content-Range"].removeprefix("bytes ").partition("-")[0].partition("/")[0]
        for request in emulator.proxy.requests
        if request.is_chunk
    ]


def chunk_sizes(emulator: Emulator) -> list[int]:
    """Bytes of each chunk that was sent; questions left out."""
    return [len(r.body) for r in emulator.proxy.requests if r.is_chunk and r.body]


def test_a_large_file_goes_in_chunks(emulator: Emulator, gcs: GcsBucket, large: Path) -> None:
    stored = gcs.upload(large, "x")
    assert stored.size == 40 * 1024 * 1024
    assert chunk_starts(emulator) == ["0", "16777216", "33554432"]


def test_a_failed_chunk_is_asked_about_and_sent_from_where_the_store_is(
    emulator: Emulator, gcs: GcsBucket, large: Path
) -> None:
    emulator.proxy.script(is_second_chunk, Fault(status=503))
    gcs.upload(large, "x")
    assert chunk_starts(emulator)[:4] == ["0", "16777216", "*", "16777216"]
    assert sum(chunk_sizes(emulator)) == (40 + 16) * 1024 * 1024


def test_a_lost_answer_to_a_chunk_does_not_send_it_twice(
    emulator: Emulator, gcs: GcsBucket, large: Path
) -> None:
    emulator.proxy.script(lambda request: request.is_chunk, Fault(lose_reply=True))
    gcs.upload(large, "x")
    assert chunk_starts(emulator) == ["0", "*", "16777216", "33554432"]


def test_a_lost_answer_to_the_last_chunk_is_no_failure(
    emulator: Emulator, gcs: GcsBucket, large: Path
) -> None:
    emulator.proxy.script(is_last_chunk, Fault(lose_reply=True))
    assert gcs.upload(large, "x").size == 40 * 1024 * 1024


@pytest.mark.parametrize("longest", [256 * 1024, 3_000_000])
def test_chunks_that_are_cut_again_and_again_get_smaller_until_they_arrive(
    emulator: Emulator, gcs: GcsBucket, large: Path, longest: int
) -> None:
    is_cut = lambda request: request.is_chunk and len(request.body) > longest  # noqa: E731
    emulator.proxy.script(is_cut, Fault(lose_request=True), times=10**6)  # and nothing is kept
    assert gcs.upload(large, "x").size == 40 * 1024 * 1024
    kept = [size for size in chunk_sizes(emulator) if size <= longest]
    assert sum(kept) == 40 * 1024 * 1024
    cut = len(chunk_sizes(emulator)) - len(kept)
    assert 0 < cut <= 3 + len(kept) / 4
    assert all(size % (256 * 1024) == 0 for size in kept)


def test_chunks_grow_again_after_a_cut(emulator: Emulator, gcs: GcsBucket, large: Path) -> None:
    emulator.proxy.script(lambda request: request.is_chunk, Fault(lose_request=True), times=1)
    gcs.upload(large, "x")
    mebibytes = [size // 2**20 for size in chunk_sizes(emulator)]
    assert mebibytes == [16, 4, 4, 4, 4, 8, 8, 8]


@pytest.mark.parametrize("held", ["bytes=0-x", "bytes=0-99999999999", "0", "bytes=0-" + "9" * 5000])
def test_an_answer_that_says_unreadably_what_arrived_is_asked_for_again(
    emulator: Emulator, gcs: GcsBucket, large: Path, held: str
) -> None:
    fault = Fault(status=308, headers={"Range": held})
    emulator.proxy.script(is_second_chunk, fault)
    assert gcs.upload(large, "x").size == 40 * 1024 * 1024


@pytest.mark.parametrize("status", [404, 410])
def test_a_forgotten_session_is_replaced(
    emulator: Emulator, gcs: GcsBucket, large: Path, status: int
) -> None:
    emulator.proxy.script(is_second_chunk, Fault(status=status))
    gcs.upload(large, "x")
    assert chunk_starts(emulator) == ["0", "16777216", "0", "16777216", "33554432"]
    assert sum(is_session(request) for request in emulator.proxy.requests) == 2


def test_sessions_forgotten_again_and_again_end_after_the_attempts(
    emulator: Emulator, gcs: GcsBucket, large: Path
) -> None:
    emulator.proxy.script(is_second_chunk, Fault(status=410), times=100)
    with pytest.raises(BucketError, match=r"uploading .*x: HTTP 410.*given up after 4 attempts"):
        gcs.upload(large, "x")


def test_a_file_removed_while_it_is_sent_is_named(
    emulator: Emulator, gcs: GcsBucket, large: Path, tmp_path: Path
) -> None:
    source = tmp_path / "gone.bin"
    source.write_bytes(large.read_bytes())

    def remove(request: Request) -> bool:
        if request.is_chunk:
            source.unlink(missing_ok=True)
        return False

    emulator.proxy.script(remove, Fault())
    with pytest.raises(BucketError, match=r"gone\.bin: No such file"):
        gcs.upload(source, "x")


def test_a_file_cut_while_it_is_sent_is_told(
    emulator: Emulator, gcs: GcsBucket, large: Path, tmp_path: Path
) -> None:
    source = tmp_path / "shrinking.bin"
    source.write_bytes(large.read_bytes())

    def shrink(request: Request) -> bool:
        if request.is_chunk:
            with source.open("r+b") as file:
                file.truncate(20_000_000)
        return False

    emulator.proxy.script(shrink, Fault())
    with pytest.raises(BucketError, match=r"ends at 20,000,000 bytes, 41,943,040 expected"):
        gcs.upload(source, "x")
