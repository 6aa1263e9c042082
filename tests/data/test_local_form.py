from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from shard_samples import npy_bytes, npz_bytes, settings

from refocused.data.cache.local_form import (
    HEADER_BYTES,
    check_vocabulary,
    local_bytes,
    local_dtype,
    write_local_form,
)
from refocused.data.manifest.shard_manifest import Shard
from refocused.system.errors import ShardError


def shard(name: str, tokens: int, dtype: str = "uint32", **known: int) -> Shard:
    return Shard(name, tokens, dtype, 0, None, None, **known)


def converted(
    tmp_path: Path, content: bytes, name: str, tokens: int, vocabulary: int = 100, **changes: int
) -> tuple[np.ndarray, int]:
    source, target = tmp_path / "source", tmp_path / "target.npy"
    source.write_bytes(content)
    max_id = write_local_form(
        [source],
        target,
        shard=shard(name, tokens, **changes),
        data=settings(**changes),
        vocabulary=vocabulary,
    )
    return np.load(target, mmap_mode="r"), max_id


def test_rows_become_one_narrow_stream(tmp_path: Path) -> None:
    rows = np.array([[5, 6, 0], [70, 0, 0]], np.int32)
    content = npz_bytes(input_ids=rows, sequence_lengths=np.array([2, 1]))
    tokens, max_id = converted(tmp_path, content, "a.npz", 4, separator_id=99)
    assert (tokens.tolist(), tokens.dtype, max_id) == ([5, 6, 99, 70], np.uint16, 99)


def test_a_vocabulary_above_uint16_keeps_uint32(tmp_path: Path) -> None:
    content = npy_bytes(np.array([1, 70_000], np.int64))
    tokens, max_id = converted(tmp_path, content, "a.npy", 2, 100_000)
    assert (tokens.tolist(), tokens.dtype, max_id) == ([1, 70_000], np.uint32, 70_000)


def test_a_stream_of_the_right_type_is_moved_as_it_is(tmp_path: Path) -> None:
    content = npy_bytes(np.arange(50, dtype=np.uint16))
    tokens, max_id = converted(tmp_path, content, "a.npy", 50)
    assert (tokens.tolist(), max_id) == (list(range(50)), 49)
    assert (tmp_path / "target.npy").read_bytes() == content
    assert not (tmp_path / "source").exists()


@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_ids_outside_the_vocabulary_name_file_id_and_vocabulary(
    tmp_path: Path, dtype: type
) -> None:
    content = npy_bytes(np.array([1, 50_256], dtype))
    with pytest.raises(ShardError, match=r"a\.npy: its largest id is 50,256.*ends at 49,999"):
        converted(tmp_path, content, "a.npy", 2, 50_000)


def test_an_id_that_would_wrap_is_told_whole(tmp_path: Path) -> None:
    content = npy_bytes(np.array([1, 65_537], np.int64))
    with pytest.raises(ShardError, match="65,537"):
        converted(tmp_path, content, "a.npy", 2)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_another_number_of_tokens_than_promised_is_refused(
    tmp_path: Path, tokens: int, dtype: type
) -> None:
    with pytest.raises(ShardError, match=f"the manifest says {tokens}"):
        converted(tmp_path, npy_bytes(np.array([1, 2], dtype)), "a.npy", tokens)


def test_sizes_are_known_before_arrival(tmp_path: Path) -> None:
    for vocabulary, itemsize in ((65_536, 2), (65_537, 4)):
        content = npy_bytes(np.arange(1000, dtype=np.int64))
        converted(tmp_path, content, "a.npy", 1000, vocabulary)
        written = (tmp_path / "target.npy").stat().st_size
        assert written == local_bytes(shard("a.npy", 1000), vocabulary=vocabulary)
        assert written == HEADER_BYTES + 1000 * itemsize
    assert local_dtype(shard("a.npy", 1, "uint16"), vocabulary=100_000) == "uint16"


def test_the_last_id_of_the_vocabulary_is_fine() -> None:
    check_vocabulary(shard("a.npy", 1), 99, vocabulary=100)
    with pytest.raises(ShardError):
        check_vocabulary(shard("a.npy", 1), 100, vocabulary=100)


def test_a_manifest_that_does_not_say_how_its_rows_are_read_is_refused(tmp_path: Path) -> None:
    rows = npz_bytes(input_ids=np.array([[5], [6]]), sequence_lengths=np.array([1, 1]))
    (tmp_path / "source").write_bytes(rows)
    with pytest.raises(ShardError, match="Write the manifest again"):
        write_local_form(
            [tmp_path / "source"],
            tmp_path / "target.npy",
            shard=shard("a.npz", 3),
            data=settings(separator_id=9),
            vocabulary=100,
        )
