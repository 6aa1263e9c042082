import io
import os
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from shard_samples import WatchedBucket, npy_bytes, settings, tokens_of

from refocused.data.formats.object_reader import FIRST_RANGE_BYTES, ObjectReader
from refocused.data.formats.token_blocks import token_blocks
from refocused.data.formats.token_layout import read_layout
from refocused.system.errors import ShardError


@pytest.fixture
def reader(tmp_path):
    bucket = WatchedBucket(tmp_path)
    content = os.urandom(10 * FIRST_RANGE_BYTES + 17)
    bucket.put("x", content)
    blob = bucket.info("x")
    assert blob is not None
    return ObjectReader(bucket, blob), content, bucket


def test_reads_are_those_of_a_file_wherever_they_jump(reader):
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


def test_a_header_that_requires_too_large_a_read_is_refused(tmp_path):
    bucket = WatchedBucket(tmp_path)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    blob = bucket.inner.info("large")
    assert blob is not None
    with pytest.raises(ShardError, match="large: its header requires a read of"):
        ObjectReader(bucket, blob).read()
    assert not bucket.reads


def test_an_object_that_shrank_is_named(tmp_path):
    bucket = WatchedBucket(tmp_path)
    bucket.put("x", b"0123456789")
    blob = bucket.info("x")
    assert blob is not None
    bucket.put("x", b"0123")
    with pytest.raises(ShardError, match="x: 4 bytes arrived"):
        ObjectReader(bucket, blob).read()


IDS = np.random.default_rng(0).integers(0, 50, 300_000, dtype=np.uint16)
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def zipped(array: npt.NDArray[Any], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("other", b"x" * 50)
        archive.writestr("ids.npy", npy_bytes(array))
    return file.getvalue()


@pytest.mark.parametrize("method", METHODS)
def test_a_member_is_read_whatever_its_compression(method):
    assert np.array_equal(tokens_of(b"prefix" + zipped(IDS, method), "a.npz"), IDS)


def test_a_member_that_deflates_to_almost_nothing_is_inflated_in_pieces():
    file = io.BytesIO(zipped(np.zeros(8_000_000, np.uint16)))
    layout = read_layout(file, name="a.npz", data=settings())
    tracemalloc.start()
    length = sum(len(block) for block in token_blocks(file, layout, name="a.npz"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert length == 8_000_000
    assert peak < 4_000_000


@pytest.mark.parametrize("place", range(1_000, 100_001, 20_000))
def test_a_flipped_bit_is_noticed_wherever_it_is(place):
    content = bytearray(zipped(IDS))
    content[place] ^= 4
    with pytest.raises(ShardError, match=r"a\.npz: the zip file is truncated or corrupt"):
        tokens_of(bytes(content), "a.npz")


def test_a_member_that_claims_more_than_it_holds_is_refused():
    content = npy_bytes(IDS).replace(b"(300000,)", b"(300004,)")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ids.npy", content)
    sizes = [size.to_bytes(4, "little") for size in (len(content), len(content) + 8)]
    assert file.getvalue().count(sizes[0]) == 2  # in the local header and in the directory
    with pytest.raises(ShardError, match=r"a\.npz: it is shorter than its header says"):
        tokens_of(file.getvalue().replace(*sizes), "a.npz")
