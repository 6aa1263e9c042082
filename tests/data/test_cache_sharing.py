from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cache_site import SHARD_BYTES, VOCABULARY, Site, shard_tokens
from shard_samples import opened, settings

from refocused.data.cache.cache import ShardCache
from refocused.data.cache.local_form import local_bytes
from refocused.data.manifest.shard_manifest import build_manifest
from refocused.system.errors import RefocusedError, ShardError


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
    with pytest.raises(ShardError, match=r"a/t_2\.npy: it cannot be read.*reported by the fetcher"):
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
    from refocused.data.cache.cache import ShardCache
    from refocused.data.manifest.shard_manifest import build_manifest

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
