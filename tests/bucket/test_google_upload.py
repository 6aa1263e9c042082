from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import GARBLED, Emulator, Fault, Request

from refocused.bucket.gcs import GcsBucket
from refocused.system.errors import BucketError

pytestmark = pytest.mark.bucket

IS_UPLOAD: Callable[[Request], bool] = lambda request: request.is_upload  # noqa: E731


def test_a_lost_answer_is_no_failure(emulator: Emulator, gcs: GcsBucket, small: Path) -> None:
    emulator.proxy.script(IS_UPLOAD, Fault(lose_reply=True))
    gcs.upload(small, "x")
    assert gcs.read("x") == small.read_bytes()


@pytest.mark.parametrize("reply", [GARBLED, b"{}"])
def test_an_answer_that_describes_nothing_is_no_failure(
    emulator: Emulator, gcs: GcsBucket, small: Path, reply: bytes
) -> None:
    emulator.proxy.script(IS_UPLOAD, Fault(reply=reply))
    gcs.upload(small, "x")
    assert gcs.read("x") == small.read_bytes()


def test_the_same_bytes_already_there_are_not_sent_in_chunks_again(
    emulator: Emulator, gcs: GcsBucket, large: Path
) -> None:
    emulator.put("some/prefix/x", large.read_bytes())
    before = gcs.info("x")
    assert gcs.upload(large, "x") == before
    assert not any(request.is_chunk for request in emulator.proxy.requests)


def test_other_bytes_already_there_are_named_and_kept(
    emulator: Emulator, gcs: GcsBucket, small: Path
) -> None:
    emulator.put("some/prefix/x", b"theirs")
    with pytest.raises(BucketError, match=r"some/prefix/x already holds other bytes: 6 bytes"):
        gcs.upload(small, "x")
    assert gcs.read("x") == b"theirs"


def test_a_file_other_than_its_checksum_is_refused_by_the_store(
    gcs: GcsBucket, large: Path
) -> None:
    with pytest.raises(BucketError, match="HTTP 400"):
        gcs.upload(large, "x", crc32c=1234)
    assert gcs.info("x") is None


def test_bytes_refused_as_damaged_are_sent_again(
    emulator: Emulator, gcs: GcsBucket, small: Path
) -> None:
    emulator.proxy.script(IS_UPLOAD, Fault(status=400, message="Provided CRC32C doesn't match"))
    assert gcs.upload(small, "x").size == 1000


def test_an_object_that_vanishes_after_it_was_stored_is_told(
    emulator: Emulator, gcs: GcsBucket, small: Path
) -> None:
    is_info = lambda request: request.method == "GET" and not request.is_download  # noqa: E731
    emulator.proxy.script(IS_UPLOAD, Fault(status=412), times=100)
    emulator.proxy.script(is_info, Fault(status=404), times=100)
    with pytest.raises(BucketError, match="said that it has it, and does not"):
        gcs.upload(small, "x")


@pytest.mark.parametrize("file", ["small", "large"])
def test_an_upload_is_described_by_its_own_answer(
    emulator: Emulator, gcs: GcsBucket, file: str, request: pytest.FixtureRequest
) -> None:
    stored = gcs.upload(request.getfixturevalue(file), "x")
    assert not any(asked.method == "GET" for asked in emulator.proxy.requests)
    assert stored == gcs.info("x")


@pytest.mark.parametrize("reply", [GARBLED, b"{}"])
def test_an_answer_to_a_last_chunk_that_describes_nothing_is_no_failure(
    emulator: Emulator, gcs: GcsBucket, large: Path, reply: bytes
) -> None:
    is_last = lambda asked: asked.headers.get("Content-Range", "").startswith("bytes 33554432")  # noqa: E731
    emulator.proxy.script(is_last, Fault(reply=reply))
    assert gcs.upload(large, "x") == gcs.info("x")
