from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_site import Site, eventually, shard_tokens
from power_cut import Disk
from shard_samples import WatchedBucket, cache_of, npy_bytes, npz_bytes, opened, pt_bytes

from refocused.bucket.bucket import BlobInfo
from refocused.bucket.folder import DirectoryBucket
from refocused.data.cache import shard_download
from refocused.data.cache.cache import ShardCache
from refocused.system.errors import ShardError

OBJECT_BYTES = 128 + 4 * 100


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_download, "SMALLEST_RANGE_BYTES", 100)


def ranges_of(bucket: WatchedBucket, name: str) -> list[int]:
    return [size for read, size in bucket.reads if read == name]


def test_what_is_needed_first_comes_by_ranges_over_all_threads(site: Site) -> None:
    cache = site.cache(fetch_threads=4)
    site.bucket.reads.clear()  # those of the manifest
    assert np.array_equal(opened(cache, 3), shard_tokens(3))
    assert ranges_of(site.bucket, "a/t_3.npy") == [OBJECT_BYTES // 4] * 4
    assert site.bucket.downloads == []
    assert not [path for path in site.folder.rglob("incoming/*/*") if path.is_file()]


def test_what_is_far_ahead_comes_whole_but_for_the_last_which_every_thread_helps_with(
    site: Site,
) -> None:
    cache = site.cache(fetch_threads=2)
    cache.plan(range(10))
    eventually(lambda: cache.progress().get("shards_ready") == 10)
    assert sorted(site.bucket.downloads) == [f"a/t_{index}.npy" for index in range(4, 9)]
    assert ranges_of(site.bucket, "a/t_9.npy")[-2:] == [OBJECT_BYTES // 2] * 2
    for index in range(10):
        assert np.array_equal(opened(cache, index), shard_tokens(index))


def test_ranges_that_do_not_fit_together_are_fetched_whole(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = site.cache()
    monkeypatch.setattr(site.bucket, "read", lambda name, *, start, length: b"\1" * length)
    assert np.array_equal(opened(cache, 0), shard_tokens(0))
    assert site.bucket.downloads == ["a/t_0.npy"]


@pytest.mark.parametrize("threads", [1, 4], ids=["whole", "by ranges"])
def test_what_is_local_survives_a_power_cut(
    site: Site, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = shard_tokens(3).astype(np.uint16)  # of the local form: moved, not converted
    site.bucket.put("a/t_3.npy", npy_bytes(tokens))
    disk = Disk(monkeypatch)
    cache = site.cache(fetch_threads=threads)
    opened(cache, 3)
    cache.close()
    disk.cut(site.folder, spared=".json")
    site.bucket.reads.clear()
    site.bucket.downloads.clear()
    assert np.array_equal(opened(site.cache(), 3), tokens)
    assert site.bucket.downloads == []
    assert ranges_of(site.bucket, "a/t_3.npy")[1:] == []  # the header, for the manifest
    named = [path.name for path in disk.exposed if "shards" in path.parts]
    assert [name for name in named if name.endswith(".npy")] == []
    disk.cut(site.folder)  # the row is lost too, and with it the trust in the file
    assert np.array_equal(opened(site.cache(), 3), tokens)


def in_folder(tmp_path: Path, files: dict[str, bytes]) -> ShardCache:
    """A cache over a folder of this machine."""
    source = tmp_path / "source"
    source.mkdir()
    for name, content in files.items():
        (source / name).write_bytes(content)
    return cache_of(DirectoryBucket(source), tmp_path / "cache")


def test_a_file_of_this_machine_is_converted_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = []
    download = DirectoryBucket.download

    def noted(bucket: DirectoryBucket, blob: BlobInfo, target: Path) -> int:
        downloads.append(blob.name)
        return download(bucket, blob, target)

    monkeypatch.setattr(DirectoryBucket, "download", noted)
    local_form = npy_bytes(shard_tokens(1).astype(np.uint16))
    files = {"a.npz": npz_bytes(tokens=shard_tokens(0)), "b.npy": local_form}
    with in_folder(tmp_path, files) as cache:
        for index in range(2):
            assert np.array_equal(opened(cache, index), shard_tokens(index))
    assert downloads == ["b.npy"]  # its copy has the local form already
    assert sorted(path.name for path in (tmp_path / "source").iterdir()) == ["a.npz", "b.npy"]


@pytest.mark.parametrize("packed", [False, True], ids=["a file", "a chunk of a pack"])
def test_a_file_that_changes_while_it_is_converted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, packed: bool
) -> None:
    files = {"a.npz": npz_bytes(tokens=shard_tokens(0))}
    if packed:
        files = {f"chunk_00000{n}.pt": pt_bytes(torch.arange(50)) for n in range(2)}
    changed = "chunk_000001.pt" if packed else "a.npz"
    convert = shard_download.write_local_form

    def convert_slowly(*arguments: Any, **named: Any) -> int:
        max_id = convert(*arguments, **named)
        (tmp_path / "source" / changed).write_bytes(b"other content")
        return max_id

    monkeypatch.setattr(shard_download, "write_local_form", convert_slowly)
    said = rf"{changed}: the object in .* changed since it was listed"
    with in_folder(tmp_path, files) as cache, pytest.raises(ShardError, match=said):
        cache.open(0)
    assert "is gone" not in caplog.text  # of the first attempt's warning too
    assert not list((tmp_path / "cache").rglob("shards/*.npy"))
