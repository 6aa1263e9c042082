import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cache_site import OBJECT_BYTES, SHARD_BYTES, Site, shard_tokens
from kills import report_of
from ranks import until
from shard_samples import cache_of, opened, settings

from refocused.data.cache.cache import ShardCache
from refocused.data.cache.local_shards import LocalShards, ShardLocks
from refocused.system.errors import ShardError


def test_ranks_that_do_not_fetch_share_one_download(site):
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


def test_a_process_that_is_frozen_while_it_makes_room_holds_up_no_other_for_good(site):
    cache, frozen = site.cache(fetch_timeout_s=1.0), ShardLocks(site.folder / "locks")
    assert frozen.acquire("room")
    with pytest.raises(ShardError, match="nothing has been fetched for 1 s"):
        cache.open(5)
    frozen.close()
    assert np.array_equal(opened(cache, 5), shard_tokens(5))


def test_a_rank_that_does_not_fetch_waits_for_the_plan_of_another(site):
    fetcher = site.cache(disk_limit_gb=(SHARD_BYTES + OBJECT_BYTES) / 1e9)
    reader = site.cache(fetches=False)
    for index in range(5):  # each takes the place of the one before
        fetcher.plan([index])
        assert np.array_equal(opened(reader, index), shard_tokens(index))
    assert site.bucket.downloads == [f"a/t_{index}.npy" for index in range(5)]


def test_a_rank_that_does_not_fetch_fetches_what_nobody_does(site):
    site.cache().plan([1])
    reader = site.cache(fetches=False)
    reader.plan([0, 1, 2])
    assert np.array_equal(opened(reader, 0), shard_tokens(0))
    until(lambda: site.local_names() == {"t_0", "t_1"})  # but nothing ahead of its use
    assert sorted(site.bucket.downloads) == ["a/t_0.npy", "a/t_1.npy"]


def test_data_sets_share_shards_and_one_limit(site):
    room = 4 * SHARD_BYTES + OBJECT_BYTES
    limit = room / 1e9

    def used() -> int:
        return sum(path.stat().st_size for path in site.folder.glob("shards/*.npy"))

    with site.cache(include=["t_0.npy", "t_1.npy", "t_2.npy"], disk_limit_gb=limit) as first:
        first.plan(range(3))
        for index in range(3):
            first.open(index)
    leftover = site.folder / "incoming" / "1-killed"
    leftover.mkdir()
    second = site.cache(include=["t_[0-4].npy"], disk_limit_gb=limit)  # two files more
    second.plan([1, 3])
    for index in (1, 3):
        assert np.array_equal(opened(second, index), shard_tokens(index))
    assert sorted(site.bucket.downloads) == [f"a/t_{index}.npy" for index in range(4)]
    assert not leftover.exists()
    third = site.cache(include=["t_[5-9].npy"], disk_limit_gb=limit)
    third.plan([0, 1])  # t_5 and t_6, in place of what no run needs: t_0 and t_2
    for index in (0, 1):
        assert np.array_equal(opened(third, index), shard_tokens(5 + index))
    assert site.local_names() == {"t_1", "t_3", "t_5", "t_6"}
    assert used() <= room


def test_the_oldest_of_other_data_is_evicted_before_what_was_planned_here(site):
    with site.cache() as earlier:
        for index in (2, 0, 1):
            earlier.plan([index])
            earlier.open(index)
    for second, index in enumerate((1, 0, 2)):  # in another order than they were made
        os.utime(site.local_file(index), (second, second))
    cache = site.cache(disk_limit_gb=(3 * SHARD_BYTES + OBJECT_BYTES) / 1e9)
    for index, left in ((3, "023"), (4, "234"), (5, "345"), (6, "456")):
        cache.plan([index])
        cache.open(index)
        assert site.local_names() == {f"t_{number}" for number in left}


def test_the_same_files_in_a_mixture_are_not_fetched_again(site):
    with site.cache(include=["t_0.npy"]) as alone:
        alone.open(0)
    sources = {"web": {"source": "x", "weight": 1}}
    data = settings(source=None, mixture=sources, include=["t_0.npy"])
    with cache_of({"web": site.bucket}, site.folder, data) as mixed:
        assert np.array_equal(opened(mixed, 0), shard_tokens(0))
    assert site.bucket.downloads == ["a/t_0.npy"]


def test_what_other_processes_reserve_counts_for_the_limit(site):
    limit = {"disk_limit_gb": (2 * SHARD_BYTES + OBJECT_BYTES) / 1e9}
    site.bucket.blocked = threading.Event()
    first, second = site.cache(**limit), site.cache(include=["t_5.npy"], **limit)
    first.plan([0])
    until(lambda: site.bucket.downloads == ["a/t_0.npy"])
    second.plan([0])
    time.sleep(0.5)  # in which it would begin
    assert site.bucket.downloads == ["a/t_0.npy"]
    site.bucket.blocked.set()
    assert np.array_equal(opened(second, 0), shard_tokens(5))
    assert np.array_equal(opened(first, 0), shard_tokens(0))


def test_a_failure_reaches_all_ranks_that_need_the_shard_and_ends_with_the_run(site):
    site.bucket.corrupt.add("a/t_2.npy")
    fetcher, reader = site.cache(), site.cache(fetches=False)
    fetcher.plan([2, 3])
    for cache in (fetcher, reader):
        with pytest.raises(ShardError, match=r"a/t_2\.npy: it is corrupt"):
            cache.open(2)
    assert np.array_equal(opened(reader, 3), shard_tokens(3))
    site.bucket.corrupt.clear()
    assert np.array_equal(opened(site.cache(), 2), shard_tokens(2))


def test_a_defect_in_a_thread_reaches_the_owner(site, monkeypatch):
    def defect(*arguments: object, **named: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("refocused.data.cache.shard_download.ShardDownload.finish", defect)
    with pytest.raises(ShardError, match="ZeroDivisionError"):
        site.cache().open(0)


def test_two_runs_in_one_folder_fetch_each_shard_once(site):
    first, second = site.cache(), site.cache()
    for cache in (first, second):
        cache.plan(range(5))
    for index in range(5):
        assert np.array_equal(opened(second, index), shard_tokens(index))
        assert np.array_equal(opened(first, index), shard_tokens(index))
    assert len(site.bucket.downloads) == 5
    first.close()  # the second takes over
    assert np.array_equal(opened(second, 7), shard_tokens(7))


CHILD = """
    import sys, threading
    from pathlib import Path
    from shard_samples import WatchedBucket, cache_of

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
    cache = cache_of(bucket, folder)
    cache.plan([0, 1, 2])
    threading.Event().wait()
"""


class Child:
    """A process that fetches shards 0 and 2, and is stuck in the download of shard 1."""

    def __init__(self, site: Site) -> None:
        arguments = [str(site.bucket.folder), str(site.folder), "a/t_1.npy"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}"},
        )

    def send_when_stuck(self, number: signal.Signals) -> None:
        """Send a signal in the middle of the download."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "stuck\n"
        self.process.send_signal(number)


@pytest.fixture
def child(site):
    child = Child(site)
    yield child
    child.process.kill()
    child.process.communicate()


def test_what_a_killed_process_was_fetching_is_fetched_by_another(site, child):
    reader = site.cache(fetches=False)
    assert np.array_equal(opened(reader, 0), shard_tokens(0))  # brought by the other process
    child.send_when_stuck(signal.SIGKILL)
    child.process.wait()
    assert list(site.folder.rglob("*.part"))
    assert np.array_equal(opened(reader, 1), shard_tokens(1))
    assert not list(site.folder.rglob("*.part"))
    assert "a/t_0.npy" not in site.bucket.downloads  # what was whole is kept
    reader.close()
    assert not list(site.folder.glob("incoming/*"))


def test_a_process_that_hangs_in_a_download_ends_the_wait_in_time(site, child):
    reader = site.cache(fetches=False, fetch_timeout_s=2.5)
    reader.open(0)
    child.send_when_stuck(signal.SIGSTOP)
    with pytest.raises(ShardError, match=r"a/t_1\.npy: .*nothing has been fetched for 2\.5 s"):
        reader.open(1)


def test_locks_are_named_and_held_together_or_alone(tmp_path):
    first, second = (ShardLocks(tmp_path / "locks") for _ in range(2))
    assert first.acquire("use a", shared=True) and second.acquire("use a", shared=True)
    assert not first.acquire("use a") and not first.is_free("use a")
    assert first.acquire("use b") and not second.acquire("use b", shared=True)
    second.close()
    assert first.is_free("use a") and first.acquire("use a")


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_stepped_clock_ends_no_wait(site, monkeypatch, step):
    site.bucket.blocked = threading.Event()
    site.cache().plan([4])
    until(lambda: site.bucket.downloads)
    reader, plain = site.cache(fetches=False), time.time
    looks, look = [0], LocalShards.open

    def open_local(local: LocalShards, index: int) -> object:
        looks[0] += 1
        if looks[0] == 10:
            monkeypatch.setattr(time, "time", lambda: plain() + step)
        if looks[0] == 30:
            site.bucket.blocked.set()
        return look(local, index)

    monkeypatch.setattr(LocalShards, "open", open_local)
    assert np.array_equal(opened(reader, 4), shard_tokens(4))


def test_a_killed_fetcher_leaves_no_wrong_shard_and_no_right_one_is_fetched_again(tmp_path):
    report = report_of("data.fetcher_kills:Fetches", tmp_path, kills=30, seed=1)
    assert report["interrupted"] > 0  # the kills met downloads and conversions halfway
    assert report["ranged"] > 0  # and shards that come by ranges
    assert (report["wrong"], report["again"], report["left"]) == ([], [], [])
