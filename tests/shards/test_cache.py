from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shard_samples import WatchedBucket, npy_bytes, npz_bytes, opened, settings

from refocused.errors import RefocusedError, ShardError
from refocused.shards.cache import ShardCache
from refocused.shards.local_form import local_bytes
from refocused.shards.manifest import build_manifest

SHARDS = 10
VOCABULARY = 2000
SHARD_BYTES = 128 + 2 * 100


def shard_tokens(index: int) -> np.ndarray:
    return np.arange(100, dtype=np.int32) + 100 * index


class Site:
    """A bucket of ten shards, a cache folder, and the caches that a test opens over them."""

    def __init__(self, folder: Path) -> None:
        self.bucket = WatchedBucket(folder / "source")
        for index in range(SHARDS):
            self.bucket.put(f"a/t_{index}.npy", npy_bytes(shard_tokens(index)))
        self.folder = folder / "cache"
        self.opened: list[ShardCache] = []

    def cache(self, *, fetches: bool = True, silence: float = 30.0, **changes: Any) -> ShardCache:
        data = settings(**changes)
        vocabulary = VOCABULARY
        manifest = build_manifest(self.bucket, data, cache_file=None)
        cache = ShardCache(
            self.bucket,
            manifest,
            self.folder,
            data=data,
            vocabulary=vocabulary,
            fetches=fetches,
            silence_seconds=silence,
        )
        self.opened.append(cache)
        return cache

    def local_names(self) -> set[str]:
        return {path.name for path in self.folder.rglob("t_*.npy.npy")}

    def local_file(self, index: int) -> Path:
        (found,) = self.folder.rglob(f"t_{index}.npy.npy")
        return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    for cache in site.opened:
        cache.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("shard ")]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.01)


def test_open_gives_the_tokens_in_the_local_type(site: Site) -> None:
    cache = site.cache()
    cache.plan([3, 1])
    for index in (3, 1, 3):
        assert cache.open(index).dtype == np.uint16
        assert np.array_equal(opened(cache, index), shard_tokens(index))
    assert sorted(site.bucket.downloads) == ["a/t_1.npy", "a/t_3.npy"]


def test_few_files_are_open_however_many_are_planned(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("refocused.shards.cache.MOST_OPEN", 3)
    cache = site.cache()
    cache.plan(range(SHARDS))
    files = [weakref.ref(cache.open(index)) for index in [*range(SHARDS), 0, 1]]
    assert sum(file() is not None for file in files) == 3
    assert np.array_equal(opened(cache, 5), shard_tokens(5))


def test_the_plan_is_fetched_in_order_of_use(site: Site) -> None:
    cache = site.cache(fetch_threads=1)
    cache.plan([6, 2, 9])
    eventually(lambda: cache.stats().missing == 0)
    assert site.bucket.downloads == ["a/t_6.npy", "a/t_2.npy", "a/t_9.npy"]


def test_what_is_waited_for_overtakes_the_plan(site: Site) -> None:
    site.bucket.blocked = threading.Event()
    cache = site.cache(fetch_threads=1)
    cache.plan(range(9))
    eventually(lambda: len(site.bucket.downloads) == 1)
    waiter = threading.Thread(target=cache.open, args=(9,))
    waiter.start()
    eventually(lambda: cache.stats().waiting)
    site.bucket.blocked.set()
    waiter.join()
    assert site.bucket.downloads.index("a/t_9.npy") == 1


def test_a_second_start_fetches_nothing(site: Site) -> None:
    first = site.cache()
    first.plan(range(4))
    eventually(lambda: first.stats().missing == 0)
    first.close()
    site.bucket.downloads.clear()
    second = site.cache()
    second.plan(range(4))
    assert np.array_equal(opened(second, 2), shard_tokens(2))
    eventually(lambda: second.stats().missing == 0)
    assert not site.bucket.downloads
    assert (second.stats().local_shards, second.stats().local_bytes) == (4, 4 * SHARD_BYTES)


def test_the_limit_holds_while_ten_shards_pass_through_room_for_three(site: Site) -> None:
    cache = site.cache(disk_limit_gb=3.5 * SHARD_BYTES / 1e9)
    for first, second in itertools.pairwise(range(SHARDS)):
        cache.plan([first, second])
        for index in (first, second):
            assert np.array_equal(opened(cache, index), shard_tokens(index))
        assert len(site.local_names()) <= 3
    assert site.local_names() == {f"t_{index}.npy.npy" for index in (7, 8, 9)}
    assert len(site.bucket.downloads) == SHARDS


def test_pinned_shards_outlive_every_plan(site: Site) -> None:
    cache = site.cache(disk_limit_gb=2 * SHARD_BYTES / 1e9)
    cache.pin([9])
    for index in range(4):
        cache.plan([index])
        cache.open(index)
    assert np.array_equal(opened(cache, 9), shard_tokens(9))
    assert site.bucket.downloads.count("a/t_9.npy") == 1


def test_an_open_shard_can_be_read_after_its_file_was_evicted(site: Site) -> None:
    cache = site.cache(disk_limit_gb=SHARD_BYTES / 1e9)
    cache.plan([0])
    file = cache.open(0)
    cache.plan([1])
    cache.open(1)
    assert site.local_names() == {"t_1.npy.npy"}
    tokens = np.empty(100, np.uint16)
    file.read_into(tokens, first=0)
    assert np.array_equal(tokens, shard_tokens(0))


def test_a_limit_below_the_plan_is_refused_with_the_numbers(site: Site) -> None:
    cache = site.cache(disk_limit_gb=2 * SHARD_BYTES / 1e9)
    cache.plan([0])
    cache.pin([9])
    with pytest.raises(ShardError, match=rf"3 shards.*{3 * SHARD_BYTES}.*{2 * SHARD_BYTES}"):
        cache.plan([0, 1])
    with pytest.raises(ShardError, match="disk_limit_gb"):
        cache.pin([7, 8])


def test_a_full_disk_is_refused_with_the_numbers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=1_000_000, free=50_100)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    cache = site.cache()
    with pytest.raises(ShardError, match=r"a/t_0\.npy: 856 bytes are needed.* 100 are free"):
        cache.open(0)


def test_without_a_limit_old_shards_make_room_on_a_full_disk(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = site.cache()
    cache.plan([0, 1])
    eventually(lambda: cache.stats().missing == 0)

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(total=0, free=856 if len(site.local_names()) < 2 else 800)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    cache.plan([2])
    assert np.array_equal(opened(cache, 2), shard_tokens(2))
    assert site.local_names() == {"t_1.npy.npy", "t_2.npy.npy"}


def test_a_truncated_local_file_is_fetched_again(site: Site) -> None:
    cache = site.cache()
    cache.open(5)
    cache.close()
    site.local_file(5).write_bytes(site.local_file(5).read_bytes()[:-1])
    assert np.array_equal(opened(site.cache(), 5), shard_tokens(5))
    assert site.bucket.downloads == ["a/t_5.npy"] * 2


def test_a_file_without_its_row_is_not_trusted(site: Site) -> None:
    cache = site.cache()
    cache.open(5)
    cache.close()
    for row in site.folder.rglob("t_5.npy.npy.json"):
        row.unlink()
    local = site.local_file(5)
    local.write_bytes(bytes(len(local.read_bytes())))
    assert np.array_equal(opened(site.cache(), 5), shard_tokens(5))


def test_verify_finds_damage_of_the_same_size_and_it_is_fetched_again(site: Site) -> None:
    cache = site.cache()
    for index in (4, 5):
        cache.open(index)
    content = bytearray(site.local_file(5).read_bytes())
    content[-1] ^= 1
    site.local_file(5).write_bytes(content)
    assert cache.verify() == [5]
    assert np.array_equal(opened(cache, 5), shard_tokens(5))
    assert cache.verify() == []


def test_other_settings_do_not_reuse_what_was_read_with_these(site: Site) -> None:
    rows = np.array([[1, 2], [3, 0]], np.int32)
    content = npz_bytes(input_ids=rows, sequence_lengths=np.array([2, 1]))
    site.bucket.put("a/rows.npz", content)
    for separator in (7, 8):
        cache = site.cache(separator_id=separator, include=["rows.npz"])
        assert opened(cache, 0).tolist() == [1, 2, separator, 3]
        cache.close()
    assert len(list(site.folder.iterdir())) == 1  # the same data set in the same folder


def test_a_changed_object_is_not_taken_for_the_old_one(site: Site) -> None:
    cache = site.cache()
    site.bucket.put("a/t_0.npy", npy_bytes(shard_tokens(0)[::-1]))
    with pytest.raises(ShardError, match=r"a/t_0\.npy: the object in .* changed"):
        cache.open(0)


def test_a_corrupt_object_is_tried_again_then_named(site: Site) -> None:
    site.bucket.corrupt.add("a/t_2.npy")
    cache = site.cache()
    cache.open(1)
    with pytest.raises(ShardError, match=r"a/t_2\.npy: it cannot be read whole.*data\.exclude"):
        cache.open(2)
    assert site.bucket.downloads.count("a/t_2.npy") == 2
    assert np.array_equal(opened(cache, 1), shard_tokens(1))


def test_a_missing_object_is_named(site: Site) -> None:
    cache = site.cache()
    (site.bucket.folder / "a/t_3.npy").unlink()
    with pytest.raises(ShardError, match=r"a/t_3\.npy: the object is gone"):
        cache.open(3)


def test_ids_outside_the_vocabulary_are_named(site: Site) -> None:
    site.bucket.put("a/t_4.npy", npy_bytes(np.array([1, VOCABULARY], np.uint16)))
    with pytest.raises(ShardError, match=r"a/t_4\.npy: its largest id is 2,000"):
        site.cache().open(4)


def test_a_manifest_that_names_such_an_id_is_refused_at_the_start(site: Site) -> None:
    data = settings()
    manifest = build_manifest(site.bucket, data, cache_file=None)
    object.__setattr__(manifest.shards[3], "max_id", VOCABULARY)
    with pytest.raises(ShardError, match=r"a/t_3\.npy: its largest id"):
        ShardCache(
            site.bucket, manifest, site.folder, data=data, vocabulary=VOCABULARY, fetches=False
        )


def test_an_outage_passes_without_an_error(site: Site) -> None:
    cache = site.cache()
    site.bucket.unreachable = True
    cache.plan([0])
    eventually(lambda: len(site.bucket.downloads) >= 2)
    site.bucket.unreachable = False
    assert np.array_equal(opened(cache, 0), shard_tokens(0))


def test_an_outage_that_stays_ends_in_the_shards_name_and_the_last_failure(site: Site) -> None:
    cache = site.cache(fetch_timeout_s=1.5)
    site.bucket.unreachable = True
    with pytest.raises(ShardError, match=r"a/t_0\.npy: nothing has been fetched.*no route"):
        cache.open(0)


def test_ranks_that_do_not_fetch_share_one_download(site: Site) -> None:
    fetcher = site.cache()
    readers = [site.cache(fetches=False) for _ in range(3)]
    results: list[bool] = []

    def read(cache: ShardCache) -> None:
        results.extend(np.array_equal(opened(cache, i), shard_tokens(i)) for i in range(4))

    threads = [threading.Thread(target=read, args=(cache,)) for cache in readers]
    for thread in threads:
        thread.start()
    fetcher.plan(range(4))
    for thread in threads:
        thread.join()
    assert results == [True] * 12
    assert sorted(site.bucket.downloads) == [f"a/t_{i}.npy" for i in range(4)]


def test_a_reader_gets_a_shard_that_the_fetcher_has_left_behind(site: Site) -> None:
    fetcher = site.cache(disk_limit_gb=SHARD_BYTES / 1e9)
    reader = site.cache(fetches=False)
    for index in (0, 1):
        fetcher.plan([index])
        fetcher.open(index)
    assert np.array_equal(opened(reader, 0), shard_tokens(0))


def test_a_request_that_was_met_is_not_met_again_after_the_eviction(site: Site) -> None:
    fetcher = site.cache(disk_limit_gb=SHARD_BYTES / 1e9)
    reader = site.cache(fetches=False)
    for index in range(5):  # faster than the fetcher looks for requests
        fetcher.plan([index])
        assert np.array_equal(opened(reader, index), shard_tokens(index))
    fetcher.plan([9])
    fetcher.open(9)
    assert not list(site.folder.rglob("asked/*"))
    assert len(site.bucket.downloads) == 6


def test_the_fetchers_failure_reaches_the_ranks_that_wait(site: Site) -> None:
    reader = site.cache(fetches=False)
    site.bucket.corrupt.add("a/t_2.npy")
    site.cache()
    with pytest.raises(ShardError, match=r"a/t_2\.npy: it cannot be read.*told by the fetcher"):
        reader.open(2)


def test_the_failure_of_an_earlier_run_is_not_taken_for_this_ones(site: Site) -> None:
    site.bucket.corrupt.add("a/t_2.npy")
    failed = site.cache()
    with pytest.raises(ShardError):
        failed.open(2)
    failed.close()
    site.bucket.corrupt.clear()
    reader = site.cache(fetches=False)
    site.cache()
    assert np.array_equal(opened(reader, 2), shard_tokens(2))


def test_a_defect_in_a_thread_reaches_the_owner(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*arguments: object, **named: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("refocused.shards.fetcher.bring", defect)
    with pytest.raises(ShardError, match="ZeroDivisionError"):
        site.cache().open(0)


def test_two_runs_in_one_folder_fetch_each_shard_once(site: Site) -> None:
    first, second = site.cache(), site.cache()
    for cache in (first, second):
        cache.plan(range(5))
    for index in range(5):
        assert np.array_equal(opened(second, index), shard_tokens(index))
        assert np.array_equal(opened(first, index), shard_tokens(index))
    assert len(site.bucket.downloads) == 5


def test_the_second_run_takes_over_when_the_first_ends(site: Site) -> None:
    first, second = site.cache(), site.cache()
    first.open(0)
    first.close()
    assert np.array_equal(opened(second, 7), shard_tokens(7))


def test_an_absent_fetcher_is_told_with_the_shards_name(site: Site) -> None:
    reader = site.cache(fetches=False, silence=0.3)
    with pytest.raises(ShardError, match=r"a/t_1\.npy: it is not local.*never started"):
        reader.open(1)


CHILD = """
    import sys, threading
    from pathlib import Path
    from shard_samples import WatchedBucket, settings
    from refocused.shards.cache import ShardCache
    from refocused.shards.manifest import build_manifest

    source, folder, stuck = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    bucket = WatchedBucket(source)
    plain = bucket.inner.download

    def download(blob, target):
        if blob.name == stuck:
            target.with_name(target.name + ".part").write_bytes(b"half")
            print("stuck", flush=True)
            threading.Event().wait()
        return plain(blob, target)

    bucket.inner.download = download
    data = settings()
    manifest = build_manifest(bucket, data, cache_file=None)
    cache = ShardCache(bucket, manifest, folder, data=data, vocabulary=2000, fetches=True)
    cache.plan([0, 1, 2])
    threading.Event().wait()
"""


@pytest.fixture
def child(site: Site) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(CHILD),
            str(site.bucket.folder),
            str(site.folder),
            "a/t_1.npy",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}"},
    )
    yield process
    process.kill()
    process.communicate()


def test_a_killed_fetcher_is_missed_and_its_leftovers_stop_nobody(
    site: Site, child: subprocess.Popen[str]
) -> None:
    reader = site.cache(fetches=False)
    assert np.array_equal(opened(reader, 0), shard_tokens(0))  # brought by the other process
    assert child.stdout is not None
    assert child.stdout.readline() == "stuck\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    with pytest.raises(ShardError, match=rf"a/t_1\.npy: .*process {child.pid}\) has ended"):
        reader.open(1)
    assert list(site.folder.rglob("*.part"))
    fresh = site.cache()
    assert np.array_equal(opened(fresh, 1), shard_tokens(1))
    fresh.close()
    assert not list(site.folder.rglob("*.part"))
    assert not list(site.folder.glob("*/incoming/*"))
    assert "a/t_0.npy" not in site.bucket.downloads  # what was whole is kept


def test_a_killed_fetcher_is_missed_by_its_lock_without_waiting_for_silence(
    site: Site, child: subprocess.Popen[str]
) -> None:
    reader = site.cache(fetches=False, silence=1e9, fetch_timeout_s=1e9)
    reader.open(0)
    assert child.stdout is not None
    assert child.stdout.readline() == "stuck\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    with pytest.raises(ShardError, match=rf"a/t_1\.npy: .*process {child.pid}\) has ended"):
        reader.open(1)


def test_a_fetcher_that_hangs_is_missed_by_its_silence(
    site: Site, child: subprocess.Popen[str]
) -> None:
    reader = site.cache(fetches=False, silence=2.5)
    reader.open(0)
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(ShardError, match=rf"a/t_1\.npy: .*process {child.pid}\) has given no sign"):
        reader.open(1)


def test_every_error_is_one_a_person_is_meant_to_read(site: Site) -> None:
    assert issubclass(ShardError, RefocusedError)
    with site.cache() as cache:
        cache.open(0)
    rows = list(site.folder.rglob("*.json"))
    assert all(json.loads(row.read_text()) for row in rows)
    assert cache.local_bytes(0) == local_bytes(
        build_manifest(site.bucket, settings(), cache_file=None).shards[0], vocabulary=VOCABULARY
    )
