import io
import os
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from shard_samples import WatchedBucket

from refocused.data.formats.object_reader import (
    FIRST_RANGE_BYTES,
    ObjectReader,
    member_reader,
    open_zip,
)
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
    file, content, bucket = reader
    while file.read(1000):
        pass
    assert sum(size for _, size in bucket.reads) == len(content)
    assert len(bucket.reads) <= 5  # reading on takes ever larger ranges
    twin = io.BytesIO(content)
    jumps = [(0, 0), (-22, 2), (100, 0), (5 * FIRST_RANGE_BYTES, 0), (7, 1), (-300_000, 2), (9, 0)]
    for offset, whence in jumps:
        assert file.seek(offset, whence) == twin.seek(offset, whence)
        for size in (0, 5, FIRST_RANGE_BYTES + 3):
            assert file.read(size) == twin.read(size)
    assert file.read() == twin.read()
    assert file.read(1) == b""


def test_a_header_that_requires_too_large_a_read_is_refused(tmp_path: Path) -> None:
    bucket = WatchedBucket(tmp_path)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    blob = bucket.inner.info("large")
    assert blob is not None
    with pytest.raises(ShardError, match="large: its header requires a read of"):
        ObjectReader(bucket, blob).read()
    assert not bucket.reads


def test_an_object_that_shrank_is_named(tmp_path: Path) -> None:
    bucket = WatchedBucket(tmp_path)
    bucket.put("x", b"0123456789")
    blob = bucket.info("x")
    assert blob is not None
    bucket.put("x", b"0123")
    with pytest.raises(ShardError, match="x: 4 bytes arrived"):
        ObjectReader(bucket, blob).read()


CONTENT = np.random.default_rng(0).integers(0, 50, 300_000, dtype=np.uint16).tobytes()
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def zipped(members: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def read_all(content: bytes, *, size: int = 100_000, offset: int = 0) -> bytes:
    file = io.BytesIO(content)
    with open_zip(file, name="a.npz") as archive:
        read = member_reader(file, archive, "ids.npy", offset=offset)
        pieces = list(iter(lambda: read(size), b""))
    return b"".join(pieces)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [777, 65_536, 10**7])
def test_a_member_is_read_from_an_offset_in_pieces_of_any_size(method: int, size: int) -> None:
    content = b"prefix" + zipped({"other": b"x" * 50, "ids.npy": CONTENT}, method)
    assert read_all(content, size=size, offset=128) == CONTENT[128:]
    assert read_all(zipped({"ids.npy": b""}, method)) == b""


def test_a_member_that_deflates_to_almost_nothing_is_inflated_in_pieces() -> None:
    content = zipped({"ids.npy": bytes(16_000_000)})
    file = io.BytesIO(content)
    with open_zip(file, name="a.npz") as archive:
        read = member_reader(file, archive, "ids.npy", offset=0)
        tracemalloc.start()
        length = sum(len(piece) for piece in iter(lambda: read(1 << 17), b""))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert length == 16_000_000
    assert peak < 4_000_000


@pytest.mark.parametrize("place", range(60, 100_060, 20_000))
def test_a_flipped_bit_is_noticed_wherever_it_is(place: int) -> None:
    content = bytearray(zipped({"ids.npy": CONTENT}))
    content[place] ^= 4
    with pytest.raises(ShardError, match=r"a\.npz: the zip file is truncated or corrupt"):
        read_all(bytes(content))


def test_a_member_that_claims_more_than_it_holds_is_refused() -> None:
    content = zipped({"ids.npy": CONTENT})
    true, claimed = (length.to_bytes(4, "little") for length in (len(CONTENT), len(CONTENT) + 9))
    assert content.count(true) == 2  # in the local header and in the directory
    with pytest.raises(ShardError, match=r"the data of 'ids\.npy' are truncated"):
        read_all(content.replace(true, claimed))
