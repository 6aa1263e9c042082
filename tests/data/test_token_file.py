from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refocused.data.cache.local_shards import TokenFile
from refocused.system.errors import ShardError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shard") / "x.npy"
    np.save(path, np.arange(1000, dtype=np.uint16))
    return path


@settings(deadline=None)
@given(first=st.integers(0, 1000), count=st.integers(0, 1200))
def test_any_window_is_exact_or_refused(path: Path, first: int, count: int) -> None:
    file = TokenFile(path, name="x.npy")
    assert (file.count, file.dtype) == (1000, np.uint16)
    tokens = np.empty(count, np.uint16)
    if first + count <= 1000:
        file.read_into(tokens, first=first)
        assert tokens.tolist() == list(range(first, first + count))
    else:
        with pytest.raises(ShardError, match=r"x\.npy: its local copy ends at"):
            file.read_into(tokens, first=first)


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


def test_a_file_that_is_no_npy_is_named_and_an_absent_one_is_absent(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"words")
    with pytest.raises(ShardError, match=r"x\.npy: it starts with"):
        TokenFile(tmp_path / "x.npy", name="x.npy")
    with pytest.raises(FileNotFoundError):
        TokenFile(tmp_path / "y.npy", name="y.npy")


def test_files_are_closed_when_nobody_has_them(path: Path) -> None:
    file = TokenFile(path, name="x.npy")
    descriptor = file._descriptor
    assert os.fstat(descriptor).st_size == path.stat().st_size
    del file
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
