from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.shard_samples import npy_bytes, settings
from fakes import Emulator

from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.gcs import GcsBucket
from refocused.bucket.stored import stored_crc32c
from refocused.data.manifest.shard_manifest import Manifest, Shard, write_manifest
from refocused.prepare.verify_data import Finding, verify_data


def verify(
    bucket: Any, *, deep: bool = False, vocabulary: int | None = None, **data: Any
) -> dict[str, Finding]:
    steps: list[tuple[int, int]] = []
    findings = verify_data(
        bucket,
        settings(**data),
        deep=deep,
        vocabulary=vocabulary,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps[-1][0] == steps[-1][1]
    return {finding.name: finding for finding in findings}


@pytest.fixture
def prepared(tmp_path: Path) -> DirectoryBucket:
    """Three shards of 100 tokens with their manifest."""
    bucket = DirectoryBucket(tmp_path / "data")
    rows = []
    for number in range(3):
        name = f"t_{number}.npy"
        blob = bucket.write(name, npy_bytes(np.arange(100, dtype=np.uint16) + number))
        checksum = stored_crc32c(bucket, blob)
        rows.append(Shard(name, 100, "uint16", blob.size, checksum, None, 99 + number))
    write_manifest(bucket, Manifest(tuple(rows), "gpt2"))
    return bucket


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_right_files_are_right(prepared: DirectoryBucket) -> None:
    for deep in (False, True):
        found = verify(prepared, deep=deep)
        assert [finding.problem for finding in found.values()] == [None] * 3
        assert [finding.tokens for finding in found.values()] == [100] * 3
    assert [finding.max_id for finding in found.values()] == [99, 100, 101]


def test_damage_is_found_without_reading_deep(prepared: DirectoryBucket, tmp_path: Path) -> None:
    flip(tmp_path / "data" / "t_0.npy", 200)
    (tmp_path / "data" / "t_1.npy").unlink()
    with (tmp_path / "data" / "t_2.npy").open("ab") as file:
        file.write(b"x")
    found = {name: finding.problem or "" for name, finding in verify(prepared).items()}
    assert "CRC-32C" in found["t_0.npy"]
    assert "not in the listing" in found["t_1.npy"]
    assert "bytes" in found["t_2.npy"]


def test_a_manifest_that_lies_is_found_deep(prepared: DirectoryBucket) -> None:
    blob = prepared.info("t_0.npy")
    assert blob is not None
    row = Shard("t_0.npy", 99, "uint16", blob.size, stored_crc32c(prepared, blob), None)
    write_manifest(prepared, Manifest((row,), "gpt2"))
    assert verify(prepared)["t_0.npy"].problem is None
    assert "100 tokens are in it" in (verify(prepared, deep=True)["t_0.npy"].problem or "")


def test_ids_beyond_the_vocabulary_are_found_deep(prepared: DirectoryBucket) -> None:
    found = verify(prepared, deep=True, vocabulary=101)
    assert [finding.problem is None for finding in found.values()] == [True, True, False]


def test_files_without_a_manifest_are_read(tmp_path: Path) -> None:
    bucket = DirectoryBucket(tmp_path / "data")
    bucket.write("a.npy", npy_bytes(np.arange(50, dtype=np.int32)))
    bucket.write("b.npy", npy_bytes(np.arange(50, dtype=np.int32))[:-4])
    bucket.write("c.npy", npy_bytes(np.array([1, -1], np.int32)))
    found = verify(bucket)
    assert found["a.npy"].tokens == 50
    assert "truncated" in (found["b.npy"].problem or "")
    assert found["c.npy"].problem is None
    assert "not negative" in (verify(bucket, deep=True)["c.npy"].problem or "")


@pytest.mark.bucket
def test_a_bucket_is_verified_by_its_own_checksums(emulator: Emulator) -> None:
    bucket = GcsBucket(f"{emulator.url}/data")
    blob = bucket.write("a.npy", npy_bytes(np.arange(50, dtype=np.uint16)))
    write_manifest(bucket, Manifest((Shard("a.npy", 50, "uint16", blob.size, 1, None),), "x"))
    assert "CRC-32C" in (verify(bucket)["a.npy"].problem or "")
    downloads = [r for r in emulator.proxy.requests if r.is_download and "a.npy" in r.path]
    assert not downloads
