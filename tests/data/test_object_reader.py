from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from shard_samples import WatchedBucket

from refocused.data.formats.object_reader import FIRST_RANGE_BYTES, ObjectReader
from refocused.system.errors import ShardError


@pytest.fixture
def reader(tmp_path: Path) -> tuple[ObjectReader, bytes, WatchedBucket]:
    bucket = WatchedBucket(tmp_path)
    content = os.urandom(10 * FIRST_RANGE_BYTES + 17)
    bucket.put("x", content)
    blob = bucket.info("x")
    assert blob is not None
    return ObjectReader(bucket, blob), content, bucket


def test_reads_are_those_of_a_file_wherever_they_jump(
    reader: tuple[ObjectReader, bytes, WatchedBucket],
) -> None:
    file, content, _ = reader
    twin = io.BytesIO(content)
    jumps = [(0, 0), (-22, 2), (100, 0), (5 * FIRST_RANGE_BYTES, 0), (7, 1), (-300_000, 2), (9, 0)]
    for offset, whence in jumps:
        assert file.seek(offset, whence) == twin.seek(offset, whence)
        for size in (0, 5, FIRST_RANGE_BYTES + 3):
            assert file.read(size) == twin.read(size)
    assert file.read() == twin.read()
    assert file.read(1) == b""


def test_reading_on_takes_few_ranges_and_never_more_than_there_is(
    reader: tuple[ObjectReader, bytes, WatchedBucket],
) -> None:
    file, content, bucket = reader
    while file.read(1000):
        pass
    assert sum(size for _, size in bucket.reads) == len(content)
    assert len(bucket.reads) <= 5


def test_a_header_that_asks_for_too_much_is_refused(tmp_path: Path) -> None:
    bucket = WatchedBucket(tmp_path)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    blob = bucket.inner.info("large")
    assert blob is not None
    with pytest.raises(ShardError, match="large: its header asks for"):
        ObjectReader(bucket, blob).read()
    assert not bucket.reads


def test_an_object_that_shrank_is_named(tmp_path: Path) -> None:
    bucket = WatchedBucket(tmp_path)
    bucket.put("x", b"0123456789")
    blob = bucket.info("x")
    assert blob is not None
    bucket.put("x", b"0123")
    with pytest.raises(ShardError, match="x: 4 bytes came"):
        ObjectReader(bucket, blob).read()
