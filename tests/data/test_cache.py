import contextlib
import itertools
import shutil
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from cache_site import OBJECT_BYTES, SHARD_BYTES, SHARDS, VOCABULARY, shard_tokens
from ranks import until
from shard_samples import npy_bytes, npz_bytes, opened, settings

from refocused.bucket.bucket import Bucket, crc32c_of
from refocused.bucket.folder import DirectoryBucket
from refocused.data.cache import shard_download
from refocused.data.cache.cache import ShardCache, threads_for
from refocused.data.cache.local_shards import LocalShards
from refocused.data.manifest.shard_manifest import build_manifest
from refocused.system.errors import ShardError


def test_open_files_are_limited(site, monkeypatch):
    monkeypatch.setattr("refocused.data.cache.cache.MAX_OPEN_FILES", 3)
    cache = site.cache()
    cache.plan(range(SHARDS))
    files = [weakref.ref(cache.open(index)) for index in [*range(SHARDS), 0, 1]]
    assert sum(file() is not None for file in files) == 3
    assert np.array_equal(opened(cache, 5), shard_tokens(5))


def test_the_plan_is_fetched_in_order_of_use_and_progress_counts_it(site):
    site.bucket.blocked = threading.Event()
    cache = site.cache(fetch_threads=1)
    until(lambda: "shards_local" in cache.progress())
    assert cache.progress() == {"shards_local": 0, "shards_total": SHARDS, "shards_ready": 0}
    cache.plan([6, 2, 9])
    site.bucket.blocked.set()
    until(lambda: cache.progress()["shards_ready"] == 3)
    assert site.bucket.downloads == ["a/t_6.npy", "a/t_2.npy", "a/t_9.npy"]
    site.bucket.blocked = threading.Event()
    cache.plan([6, 2, 0, 9])
    assert cache.progress() == {"shards_local": 3, "shards_total": SHARDS, "shards_ready": 2}
    site.bucket.blocked.set()
    assert site.cache(fetches=False).progress() == {"shards_total": SHARDS}


def test_what_is_waited_for_overtakes_the_plan(site, monkeypatch):
    site.bucket.blocked = threading.Event()
    cache = site.cache(fetch_threads=1)
    cache.plan(range(9))
    until(lambda: len(site.bucket.downloads) == 1)
    sleep, waits = time.sleep, threading.Event()

    def watched_sleep(seconds: float) -> None:
        if threading.current_thread() is waiter:
            waits.set()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", watched_sleep)
    waiter = threading.Thread(target=cache.open, args=(9,))
    waiter.start()
    assert waits.wait(60)
    site.bucket.blocked.set()
    waiter.join()
    assert site.bucket.downloads.index("a/t_9.npy") == 1


def test_the_limit_holds_while_ten_shards_pass_through_room_for_three(site):
    cache = site.cache(disk_limit_gb=(3.5 * SHARD_BYTES + OBJECT_BYTES) / 1e9)
    evicted = cache.open(0)
    for first, second in itertools.pairwise(range(SHARDS)):
        cache.plan([first, second])
        for index in (first, second):
            assert np.array_equal(opened(cache, index), shard_tokens(index))
        assert len(site.local_names()) <= 3
    assert site.local_names() == {"t_7", "t_8", "t_9"}
    assert len(site.bucket.downloads) == SHARDS
    tokens = np.empty(100, np.uint16)
    evicted.read_into(tokens, first=0)  # its file stays readable
    assert np.array_equal(tokens, shard_tokens(0))


@pytest.mark.parametrize("threads", [1, 8])
def test_the_limit_holds_for_what_is_on_its_way_too(site, monkeypatch, threads):
    limit, most = 5 * SHARD_BYTES + OBJECT_BYTES, 0
    convert = shard_download.write_local_form

    def watched(*arguments: Any, **named: Any) -> int:
        nonlocal most
        max_id = convert(*arguments, **named)  # the object and its local form are there
        sizes = []
        for path in site.folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                ends = (".npy", ".object", ".ranges", ".part")
                sizes.append(path.stat().st_size if path.name.endswith(ends) else 0)
        most = max(most, sum(sizes))
        return max_id

    monkeypatch.setattr(shard_download, "write_local_form", watched)
    cache = site.cache(disk_limit_gb=limit / 1e9, fetch_threads=threads)
    for first in (0, 5):
        cache.plan(range(first, first + 5))
        for index in range(first, first + 5):
            assert np.array_equal(opened(cache, index), shard_tokens(index))
    assert OBJECT_BYTES < most <= limit


def test_pinned_shards_outlive_every_plan(site):
    cache, reader = (
        site.cache(fetches=fetches, disk_limit_gb=(2 * SHARD_BYTES + OBJECT_BYTES) / 1e9)
        for fetches in (True, False)
    )
    for each in (cache, reader):
        each.pin([9])
    pinned = reader.open(9)
    for index in range(4):
        for each in (cache, reader):
            each.plan([index])
            each.open(index)
    assert np.array_equal(opened(cache, 9), shard_tokens(9))
    assert reader.open(9) is pinned  # still open
    assert site.bucket.downloads.count("a/t_9.npy") == 1
    with pytest.raises(ShardError, match="3 shards are needed at once"):
        reader.plan([0, 1])


def test_a_limit_below_the_plan_is_refused_with_the_numbers(site):
    cache = site.cache(disk_limit_gb=(2 * SHARD_BYTES + OBJECT_BYTES) / 1e9)
    cache.plan([0])
    cache.pin([9])
    needed, limit = (f"{n * SHARD_BYTES + OBJECT_BYTES:,}" for n in (3, 2))
    with pytest.raises(ShardError, match=rf"3 shards.*{needed} bytes.*{limit}\."):
        cache.plan([0, 1])
    with pytest.raises(ShardError, match="disk_limit_gb"):
        cache.pin([7, 8])


@pytest.mark.slow
def test_without_a_limit_old_shards_make_room_on_a_full_disk_until_none_is_left(site, monkeypatch):
    cache = site.cache()
    cache.plan([0, 1])
    until(lambda: cache.progress().get("shards_ready") == 2)

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(total=0, free=856 if len(site.local_names()) < 2 else 800)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    cache.plan([2])
    assert np.array_equal(opened(cache, 2), shard_tokens(2))
    assert site.local_names() == {"t_1", "t_2"}
    full = SimpleNamespace(total=1_000_000, free=50_100)  # 5 % is left free
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    with pytest.raises(ShardError, match=r"a/t_3\.npy: 856 bytes are needed.* 100 are free"):
        cache.open(3)


def test_a_file_without_its_row_is_not_trusted(site):
    cache = site.cache()
    cache.open(5)
    cache.close()
    for row in site.folder.rglob("t_5.npy.*.json"):
        row.unlink()
    local = site.local_file(5)
    local.write_bytes(bytes(len(local.read_bytes())))
    assert np.array_equal(opened(site.cache(), 5), shard_tokens(5))


DAMAGES = {
    "legal ids": lambda content: content[:-2] + b"\1\0",
    "ids beyond the vocabulary": lambda content: content[:-2] + b"\xff\xff",
    "zeros": lambda content: bytes(len(content)),
    "truncated": lambda content: content[:-1],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("fetches", [True, False], ids=["the fetcher", "another rank"])
def test_damage_of_the_same_size_is_found_at_the_first_opening_and_fetched_again(
    site, damage, fetches, caplog
):
    first = site.cache()
    for index in (4, 5):
        first.open(index)
    first.close()
    site.local_file(5).write_bytes(DAMAGES[damage](site.local_file(5).read_bytes()))
    second = site.cache()
    cache = second if fetches else site.cache(fetches=False)
    for index in (4, 5):
        assert np.array_equal(opened(cache, index), shard_tokens(index))
    assert sorted(site.bucket.downloads) == ["a/t_4.npy", "a/t_5.npy", "a/t_5.npy"]
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    said = [text for text in warnings if "damaged" in text]
    named = f"a/t_5.npy: its local copy {site.local_file(5)} is damaged"
    assert [text.startswith(named) for text in said] == [True] * (damage != "truncated")


def test_a_copy_that_is_damaged_whenever_it_was_fetched_ends_in_the_disks_name(site, monkeypatch):
    publish = LocalShards.publish

    def publish_on_a_bad_disk(local: LocalShards, index: int, *others: Any, **named: Any) -> None:
        publish(local, index, *others, **named)
        local.path(index).write_bytes(bytes(SHARD_BYTES))

    monkeypatch.setattr(LocalShards, "publish", publish_on_a_bad_disk)
    with pytest.raises(ShardError, match=r"a/t_5\.npy: .*damaged 3 times.*data\.cache"):
        site.cache().open(5)
    assert site.bucket.downloads == ["a/t_5.npy"] * 3


def test_a_second_start_fetches_nothing_and_verifies_a_copy_once(site, monkeypatch):
    with site.cache() as first:
        first.plan(range(4))
        until(lambda: first.progress().get("shards_ready") == 4)
    site.bucket.downloads.clear()
    read = []
    monkeypatch.setattr(
        "refocused.data.cache.local_shards.crc32c_of",
        lambda path: read.append(path) or crc32c_of(path),
    )
    cache = site.cache()
    for planned in ([2], [], [2]):
        cache.plan(planned)
        if planned:
            assert cache.open(2).dtype == np.uint16
            assert np.array_equal(opened(cache, 2), shard_tokens(2))
    until(lambda: cache.progress().get("shards_local") == 4)
    assert not site.bucket.downloads
    assert read == [site.local_file(2)]


def test_data_that_is_read_otherwise_has_files_of_its_own(site):
    rows = np.array([[1, 2], [3, 0]], np.int32)
    site.bucket.put("a/rows.npz", npz_bytes(input_ids=rows, sequence_lengths=np.array([2, 1])))
    for separator in (7, 8):  # side by side: neither waits for the other
        cache = site.cache(separator_id=separator, include=["rows.npz"])
        assert opened(cache, 0).tolist() == [1, 2, separator, 3]
    assert len(list(site.folder.glob("shards/rows*.npy"))) == 2
    for separator in (7, 8):  # which changes no token of a stream
        cache = site.cache(separator_id=separator, pad_id=separator, include=["t_0.npy"])
        assert np.array_equal(opened(cache, 0), shard_tokens(0))
    assert site.local_names() == {"t_0"}
    assert site.bucket.downloads.count("a/t_0.npy") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [(npy_bytes(shard_tokens(0)[::-1]), "the object in .* changed"), (None, "the object is gone")],
)
def test_an_object_that_changed_or_went_is_named(site, content, said):
    cache = site.cache()
    if content is None:
        (site.bucket.folder / "a/t_0.npy").unlink()
    else:
        site.bucket.put("a/t_0.npy", content)
    with pytest.raises(ShardError, match=rf"a/t_0\.npy: {said}"):
        cache.open(0)


@pytest.mark.parametrize("threads", [1, 4], ids=["whole", "by ranges"])
def test_a_disk_that_is_full_for_a_while_ends_nothing(site, monkeypatch, threads):
    monkeypatch.setattr("refocused.data.cache.shard_download.MIN_RANGE_BYTES", 100)
    full, plain = [1] * 3, Path.open

    def open_file(path: Path, mode: str = "r", *others: Any, **named: Any) -> Any:
        if "w" in mode and "incoming" in path.parts and full:
            full.pop()
            raise OSError(28, "No space left on device", str(path))
        return plain(path, mode, *others, **named)

    monkeypatch.setattr(Path, "open", open_file)
    assert np.array_equal(opened(site.cache(fetch_threads=threads), 0), shard_tokens(0))
    assert not full


def test_a_manifest_that_names_such_an_id_is_refused_at_the_start(site):
    data = settings()
    manifest = build_manifest(site.bucket, data)
    object.__setattr__(manifest.shards[3], "max_id", VOCABULARY)
    unused = {"data": data, "vocabulary": VOCABULARY, "fetches": False}
    with pytest.raises(ShardError, match=r"a/t_3\.npy: its largest id"):
        ShardCache({"": site.bucket}, manifest, site.folder, **unused)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (64, 8)])
def test_a_folder_is_read_by_a_thread_a_core_and_a_store_by_as_many_as_are_set(
    cores, threads, tmp_path
):
    assert threads_for([DirectoryBucket(tmp_path)], 8, cores=cores) == threads
    assert threads_for([cast("Bucket", object())], 8, cores=cores) == 8
