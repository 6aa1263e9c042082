import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache_site import OBJECT_BYTES, shard_tokens
from power_cut import Disk
from ranks import until
from shard_samples import WatchedBucket, cache_of, npy_bytes, npz_bytes, opened, pt_bytes, settings

from refocused.bucket.bucket import BlobInfo
from refocused.bucket.folder import DirectoryBucket
from refocused.data.cache import shard_download
from refocused.data.cache.cache import ShardCache
from refocused.data.cache.local_shards import HEADER_BYTES, RESERVED, TokenFile, local_bytes
from refocused.data.cache.shard_download import write_local_form
from refocused.data.manifest.shard_manifest import Shard
from refocused.system.errors import ShardError


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch):
    monkeypatch.setattr(shard_download, "MIN_RANGE_BYTES", 100)


def ranges_of(bucket: WatchedBucket, name: str) -> list[int]:
    return [size for read, size in bucket.reads if read == name]


def test_what_is_needed_first_comes_by_ranges_over_all_threads(site):
    cache = site.cache(fetch_threads=4)
    site.bucket.reads.clear()  # those of the manifest
    assert np.array_equal(opened(cache, 3), shard_tokens(3))
    assert ranges_of(site.bucket, "a/t_3.npy") == [OBJECT_BYTES // 4] * 4
    assert site.bucket.downloads == []
    assert {path.name for path in site.folder.glob("incoming/*/*")} == {RESERVED}


def test_later_shards_are_downloaded_whole_and_the_last_one_by_all_threads(site):
    cache = site.cache(fetch_threads=2)
    cache.plan(range(10))
    until(lambda: cache.progress().get("shards_ready") == 10)
    assert sorted(site.bucket.downloads) == [f"a/t_{index}.npy" for index in range(4, 9)]
    assert ranges_of(site.bucket, "a/t_9.npy")[-2:] == [OBJECT_BYTES // 2] * 2
    for index in range(10):
        assert np.array_equal(opened(cache, index), shard_tokens(index))


def test_ranges_of_different_versions_are_downloaded_again_as_a_whole(site, monkeypatch):
    cache = site.cache()
    monkeypatch.setattr(site.bucket, "read", lambda name, *, start, length: b"\1" * length)
    assert np.array_equal(opened(cache, 0), shard_tokens(0))
    assert site.bucket.downloads == ["a/t_0.npy"]


@pytest.mark.parametrize("threads", [1, 4], ids=["whole", "by ranges"])
def test_local_shards_survive_a_power_cut(site, threads, monkeypatch):
    tokens = shard_tokens(3).astype(np.uint16)  # of the local form: moved, not converted
    site.bucket.put("a/t_3.npy", npy_bytes(tokens))
    disk = Disk(monkeypatch)
    cache = site.cache(fetch_threads=threads)
    opened(cache, 3)
    cache.close()
    disk.cut(site.folder, spared=".json")
    site.bucket.reads.clear()
    site.bucket.downloads.clear()
    with site.cache() as cache:
        assert np.array_equal(opened(cache, 3), tokens)
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


def test_a_local_file_is_converted_in_place(tmp_path, monkeypatch):
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
def test_a_file_that_changes_while_it_is_converted_is_named(tmp_path, monkeypatch, caplog, packed):
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


def test_ids_that_are_probably_no_tokens_are_warned_of(tmp_path, caplog):
    converted(tmp_path, ids([5] * 700 + [1] * 300), "a.npy", 1000)
    assert "a.npy: 70% of its first 1,000 ids are 5. If it is padding" in caplog.text


ROWS = npz_bytes(
    input_ids=np.array([[5, 6, 0], [70, 0, 0]], np.int32), sequence_lengths=np.array([2, 1])
)


@pytest.mark.parametrize(
    ("vocabulary", "stored", "local"),
    [(65_536, "uint32", "uint16"), (65_537, "uint32", "uint32"), (65_537, "uint16", "uint16")],
)
def test_the_type_is_as_narrow_as_file_or_vocabulary_allow(tmp_path, vocabulary, stored, local):
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
    tmp_path, dtype, values, tokens, vocabulary, said
):
    with pytest.raises(ShardError, match=said):
        converted(tmp_path, ids(values, dtype), "a.npy", tokens, vocabulary)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_an_id_too_large_for_the_type_in_the_manifest_is_refused(tmp_path, dtype):
    with pytest.raises(
        ShardError, match=r"a\.npy: it holds the id 70,000, but manifest\.json says"
    ):
        converted(tmp_path, ids([1, 70_000], dtype), "a.npy", 2, 100_000, "uint16")


def test_a_manifest_that_does_not_say_how_its_rows_are_read_is_refused(tmp_path):
    with pytest.raises(ShardError, match="Write the manifest again"):
        converted(tmp_path, ROWS, "a.npz", 4, separator_id=9)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("shard") / "x.npy"
    np.save(path, np.arange(1000, dtype=np.uint16))
    return path


def test_a_file_cut_while_it_is_open_is_an_error_and_no_signal(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.arange(100_000, dtype=np.uint32))
    file = TokenFile(path, name="some/x.npy")
    os.truncate(path, 5000)
    with pytest.raises(ShardError, match=r"some/x\.npy: .*ends at 5,000 bytes, 400,128 expected"):
        file.read_into(np.empty(99_999, np.uint32), first=1)


def test_a_disk_that_fails_is_named(path, monkeypatch):
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    file = TokenFile(path, name="x.npy")
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ShardError, match=r"x\.npy: .*cannot be read \(Input/output error\)"):
        file.read_into(np.empty(3, np.uint16), first=1)


def test_unreferenced_files_are_closed(path):
    def opened() -> int:  # of this file alone: garbage of other tests is closed at any time
        links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
        return sum(os.path.realpath(link) == str(path.resolve()) for link in links)

    files = [TokenFile(path, name="x.npy") for _ in range(20)]
    assert opened() == 20
    files.clear()
    gc.collect()
    assert opened() == 0
