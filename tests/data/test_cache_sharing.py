import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cache_site import OBJECT_BYTES, SHARD_BYTES, Site, shard_tokens
from kills import report_of
from ranks import until
from shard_samples import cache_of, opened, settings

from refocused.data.cache.cache import ShardCache
from refocused.data.cache.local_shards import REQUEST_SECONDS, FetcherFiles, LocalShards
from refocused.system.errors import ShardError


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


def test_a_reader_gets_local_shards_and_a_request_is_fulfilled_once(site: Site) -> None:
    fetcher = site.cache(disk_limit_gb=(SHARD_BYTES + OBJECT_BYTES) / 1e9)
    reader = site.cache(fetches=False)
    for index in range(5):  # faster than the fetcher looks for requests
        fetcher.plan([index])
        assert np.array_equal(opened(reader, index), shard_tokens(index))
    fetcher.plan([9])
    fetcher.open(9)
    assert not list(site.folder.rglob("asked/*"))
    assert len(site.bucket.downloads) == 6
    assert np.array_equal(opened(site.cache(fetches=False), 0), shard_tokens(0))


@pytest.mark.timeout(60)  # without end, otherwise: the plan's shard took its place each time
def test_a_requested_shard_stays_until_its_rank_has_opened_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fetcher = site.cache(disk_limit_gb=(SHARD_BYTES + OBJECT_BYTES) / 1e9)
    fetcher.plan([9])
    fetcher.open(9)
    monkeypatch.setattr("refocused.data.cache.cache.POLL_SECONDS", 0.9)  # a rank that is slow
    assert np.array_equal(opened(site.cache(fetches=False), 0), shard_tokens(0))
    until(lambda: site.local_names() == {"t_9"})
    assert site.bucket.downloads == ["a/t_9.npy", "a/t_0.npy", "a/t_9.npy"]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_data_sets_share_shards_and_one_limit(site: Site) -> None:
    room = 4 * SHARD_BYTES + OBJECT_BYTES
    limit = room / 1e9

    def used() -> int:
        return sum(path.stat().st_size for path in site.folder.glob("shards/*.npy"))

    with site.cache(include=["t_0.npy", "t_1.npy", "t_2.npy"], disk_limit_gb=limit) as first:
        first.plan(range(3))
        for index in range(3):
            first.open(index)
    leftover = next(site.folder.glob("*/fetcher.lock")).parent / "incoming" / "1-killed"
    leftover.mkdir(parents=True)
    second = site.cache(include=["t_[0-4].npy"], disk_limit_gb=limit)  # two files more
    second.plan([1, 3])
    for index in (1, 3):
        assert np.array_equal(opened(second, index), shard_tokens(index))
    assert sorted(site.bucket.downloads) == [f"a/t_{index}.npy" for index in range(4)]
    assert not leftover.exists()
    files = FetcherFiles(second._local.folder)
    until(lambda: len(getattr(files.heartbeat(), "wanted", ())) == 2)
    third = site.cache(include=["t_[5-9].npy"], disk_limit_gb=limit)
    third.plan([0, 1])  # t_5 and t_6, in place of what no run needs: t_0 and t_2
    for index in (0, 1):
        assert np.array_equal(opened(third, index), shard_tokens(5 + index))
    assert site.local_names() == {"t_1", "t_3", "t_5", "t_6"}
    assert used() <= room


def test_the_same_files_in_a_mixture_are_not_fetched_again(site: Site) -> None:
    with site.cache(include=["t_0.npy"]) as alone:
        alone.open(0)
    sources = {"web": {"source": "x", "weight": 1}}
    data = settings(source=None, mixture=sources, include=["t_0.npy"])
    with cache_of({"web": site.bucket}, site.folder, data) as mixed:
        assert np.array_equal(opened(mixed, 0), shard_tokens(0))
    assert site.bucket.downloads == ["a/t_0.npy"]


def test_the_fetchers_failure_reaches_the_ranks_that_wait(site: Site) -> None:
    reader = site.cache(fetches=False)
    site.bucket.corrupt.add("a/t_2.npy")
    site.cache()
    with pytest.raises(ShardError, match=r"a/t_2\.npy: it is corrupt.*reported by the fetcher"):
        reader.open(2)


def test_the_failure_of_an_earlier_run_is_ignored(site: Site) -> None:
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

    monkeypatch.setattr("refocused.data.cache.shard_download.ShardDownload.finish", defect)
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

    def kill_when_stuck(self) -> str:
        """Kill it in the middle of the download; return what a waiting rank reports."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "stuck\n"
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return rf"a/t_1\.npy: .*process {self.process.pid}\) has ended"


@pytest.fixture
def child(site: Site) -> Iterator[Child]:
    child = Child(site)
    yield child
    child.process.kill()
    child.process.communicate()


def test_a_killed_fetcher_is_noticed_and_its_remains_are_harmless(site: Site, child: Child) -> None:
    reader = site.cache(fetches=False)
    assert np.array_equal(opened(reader, 0), shard_tokens(0))  # brought by the other process
    with pytest.raises(ShardError, match=child.kill_when_stuck()):
        reader.open(1)
    assert list(site.folder.rglob("*.part"))
    fresh = site.cache()
    assert np.array_equal(opened(fresh, 1), shard_tokens(1))
    fresh.close()
    assert not list(site.folder.rglob("*.part"))
    assert not list(site.folder.glob("*/incoming/*"))
    assert "a/t_0.npy" not in site.bucket.downloads  # what was whole is kept


def test_a_killed_fetcher_is_noticed_by_its_lock_before_its_heartbeat_is_late(
    site: Site, child: Child
) -> None:
    reader = site.cache(fetches=False, silence=1e9, fetch_timeout_s=1e9)
    reader.open(0)
    with pytest.raises(ShardError, match=child.kill_when_stuck()):
        reader.open(1)


def test_a_fetcher_that_hangs_or_never_started_is_noticed_by_its_heartbeat(
    site: Site, child: Child
) -> None:
    with pytest.raises(ShardError, match=r"a/t_9\.npy: it is not local.*never started"):
        site.cache(fetches=False, silence=0.0, exclude=["a/t_0.npy"]).open(8)
    site.cache(fetches=False).open(0)
    reader = site.cache(fetches=False, silence=2.5)
    child.process.send_signal(signal.SIGSTOP)
    who = rf"process {child.process.pid}\) has written no heartbeat"
    with pytest.raises(ShardError, match=rf"a/t_1\.npy: .*{who}"):
        reader.open(1)


def test_requests_last_for_a_while_and_can_be_withdrawn(tmp_path: Path) -> None:
    files = FetcherFiles(tmp_path)
    for index in (3, 1, 2):
        files.request(index)
    files.withdraw(2)
    # Listed, and gone when it is looked at: what a withdrawal in between looks like.
    (tmp_path / "asked" / "4").symlink_to(tmp_path / "gone")
    for path, years in (("1", 1), ("3", -1)):  # a disk whose server has another clock
        moved = time.time() + years * 365 * 24 * 3600
        os.utime(tmp_path / "asked" / path, (moved, moved))
    assert files.requests(now=50.0) == [1, 3]
    os.utime(tmp_path / "asked" / "1", (1.0, 1.0))  # repeated, after the clock was set back
    assert files.requests(now=49.0 + REQUEST_SECONDS) == [1, 3]
    assert files.requests(now=50.0 + REQUEST_SECONDS) == [1]
    assert not (tmp_path / "asked" / "3").exists()


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_stepped_clock_ends_no_wait(
    site: Site, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    site.bucket.blocked = threading.Event()
    site.cache()
    reader, plain = site.cache(fetches=False), time.time
    looks, look = [0], FetcherFiles.heartbeat

    def heartbeat(files: FetcherFiles) -> object:
        looks[0] += 1
        if looks[0] == 20:
            monkeypatch.setattr(time, "time", lambda: plain() + step)
        if looks[0] == 80:
            site.bucket.blocked.set()
        return look(files)

    monkeypatch.setattr(FetcherFiles, "heartbeat", heartbeat)
    assert np.array_equal(opened(reader, 4), shard_tokens(4))


def test_the_fetcher_is_heard_before_it_has_looked_at_its_shards(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, look = [], LocalShards.present

    def present(local: LocalShards) -> set[int]:
        looked.append(FetcherFiles(local.folder).heartbeat() is not None)
        return look(local)

    monkeypatch.setattr(LocalShards, "present", present)
    cache = site.cache()
    until(lambda: "shards_local" in cache.progress())
    assert looked and all(looked)


def test_a_killed_fetcher_leaves_no_wrong_shard_and_no_right_one_is_fetched_again(
    tmp_path: Path,
) -> None:
    report = report_of("data.fetcher_kills:Fetches", tmp_path, kills=30, seed=1)
    assert report["interrupted"] > 0  # the kills met downloads and conversions halfway
    assert report["ranged"] > 0  # and shards that come by ranges
    assert (report["wrong"], report["again"], report["left"]) == ([], [], [])
