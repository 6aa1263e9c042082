"""The local form of a shard, how it is written, and how it is read by position."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_samples import npy_bytes, npz_bytes, settings

from refocused.data.cache.local_shards import HEADER_BYTES, TokenFile, local_bytes
from refocused.data.cache.shard_download import write_local_form
from refocused.data.manifest.shard_manifest import Shard
from refocused.system.errors import ShardError


def converted(
    folder: Path,
    content: bytes,
    name: str,
    tokens: int,
    vocabulary: int = 100,
    dtype: str = "uint32",
    separator_id: int | None = None,
    counted_separator: int | None = None,
) -> tuple[Any, int]:
    source, target = folder / "source", folder / "target.npy"
    source.write_bytes(content)
    shard = Shard(name, tokens, dtype, 0, None, None, separator_id=counted_separator)
    data = settings(separator_id=separator_id)
    max_id = write_local_form([source], target, shard=shard, data=data, vocabulary=vocabulary)
    assert target.stat().st_size == local_bytes(shard, vocabulary=vocabulary)  # known before
    return np.load(target, mmap_mode="r"), max_id


def ids(values: list[int], dtype: type = np.int64) -> bytes:
    return npy_bytes(np.array(values, dtype))


ROWS = npz_bytes(
    input_ids=np.array([[5, 6, 0], [70, 0, 0]], np.int32), sequence_lengths=np.array([2, 1])
)


@pytest.mark.parametrize(
    ("vocabulary", "stored", "local"),
    [(65_536, "uint32", "uint16"), (65_537, "uint32", "uint32"), (65_537, "uint16", "uint16")],
)
def test_the_type_is_as_narrow_as_file_or_vocabulary_allow(
    tmp_path: Path, vocabulary: int, stored: str, local: str
) -> None:
    content = ids([1, 65_000], np.int64 if stored == "uint32" else np.uint16)
    tokens, max_id = converted(tmp_path, content, "a.npy", 2, vocabulary, stored)
    assert (tokens.tolist(), tokens.dtype, max_id) == ([1, 65_000], local, 65_000)
    assert (tmp_path / "target.npy").stat().st_size == HEADER_BYTES + 2 * tokens.itemsize
    is_moved = stored == "uint16"  # what has the local form already
    assert (tmp_path / "source").exists() is not is_moved
    assert ((tmp_path / "target.npy").read_bytes() == content) is is_moved


@pytest.mark.parametrize(
    ("dtype", "values", "tokens", "vocabulary", "said"),
    [
        (np.uint16, [1, 50_256], 2, 50_000, r"a\.npy: its largest id is 50,256.*ends at 49,999"),
        (np.uint16, [1, 2], 1, 100, "the manifest says 1"),
        (np.int64, [1, 100], 2, 100, "its largest id is 100"),
        (np.int64, [1, 65_537], 2, 100, "its largest id is 65,537"),  # which wraps in uint16
        (np.int64, [1, 2], 1, 100, "the manifest says 1"),
        (np.int64, [1, 2], 3, 100, "the manifest says 3"),
    ],
)
def test_ids_and_numbers_that_do_not_fit_are_refused(
    tmp_path: Path, dtype: type, values: list[int], tokens: int, vocabulary: int, said: str
) -> None:
    with pytest.raises(ShardError, match=said):
        converted(tmp_path, ids(values, dtype), "a.npy", tokens, vocabulary)


def test_a_manifest_that_does_not_say_how_its_rows_are_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="Write the manifest again"):
        converted(tmp_path, ROWS, "a.npz", 4, separator_id=9)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shard") / "x.npy"
    np.save(path, np.arange(1000, dtype=np.uint16))
    return path


def test_a_file_cut_while_it_is_open_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(100_000, dtype=np.uint32))
    file = TokenFile(path, name="some/x.npy")
    os.truncate(path, 5000)
    with pytest.raises(ShardError, match=r"some/x\.npy: .*ends at 5,000 bytes, 400,128 expected"):
        file.read_into(np.empty(99_999, np.uint32), first=1)


def test_a_disk_that_fails_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    file = TokenFile(path, name="x.npy")
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ShardError, match=r"x\.npy: .*cannot be read \(Input/output error\)"):
        file.read_into(np.empty(3, np.uint16), first=1)


def test_files_are_closed_when_nobody_has_them(path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    files = [TokenFile(path, name="x.npy") for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) >= before + 20
    files.clear()
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) < before + 20
