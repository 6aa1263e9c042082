"""Every fault of a network and a store between `ShardCache` and the emulator, end to end."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_site import Site
from fakes import GARBLED, Emulator, Fault, Request
from ranks import until
from shard_samples import npy_bytes, npz_bytes, opened

from refocused.bucket.gcs import ONCE
from refocused.bucket.open_bucket import open_bucket
from refocused.bucket.retry import Retry
from refocused.data.cache import cache as cache_module
from refocused.data.cache import shard_download
from refocused.data.cache.cache import ShardCache
from refocused.system.errors import ShardError

pytestmark = pytest.mark.bucket

SHARDS = 5
TOKENS = 30_000
VOCABULARY = 50_000


def shard_tokens(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, VOCABULARY, TOKENS).astype(np.uint16)


def is_download(request: Request) -> bool:
    return request.is_download and "range" not in {key.lower() for key in request.headers}


def is_resumed(request: Request) -> bool:
    return request.is_download and not is_download(request)


def names_shard(index: int) -> Callable[[Request], bool]:
    return lambda request: request.is_download and f"t_{index}" in request.path


class FaultySite(Site):
    """Five shards in the emulator, and a cache over them whose waits are short."""

    def __init__(self, emulator: Emulator, folder: Path) -> None:
        self.proxy = emulator.proxy
        for index in range(SHARDS - 1):
            emulator.put(f"tokens/t_{index}.npy", npy_bytes(shard_tokens(index)))
        emulator.put(f"tokens/t_{SHARDS - 1}.npz", npz_bytes(tokens=shard_tokens(SHARDS - 1)))
        policy = Retry(
            attempts=4, sleep=lambda seconds: time.sleep(min(seconds, 0.05)), draw=lambda: 0.0
        )
        self.bucket = open_bucket(f"{emulator.url}/tokens", retry=policy)
        self.folder, self.opened = folder / "cache", []
        self.vocabulary = VOCABULARY

    def cache(self, **changes: Any) -> ShardCache:
        cache = super().cache(**changes)
        self.proxy.requests.clear()
        return cache

    def downloads(self) -> list[str]:
        """The objects of the whole and resumed downloads so far."""
        return [r.path.rpartition("/")[2] for r in self.proxy.requests if r.is_download]

    def published(self) -> list[str]:
        files = (path for path in self.folder.glob("shards/*") if not path.name.startswith("."))
        return sorted(path.name.partition(".")[0] + path.suffix for path in files)


@pytest.fixture
def site(emulator, tmp_path, monkeypatch):
    monkeypatch.setitem(ONCE, "timeout", (2.0, 1.0))
    monkeypatch.setattr(cache_module, "RETRY", Retry(max_wait_s=0.05))
    site = FaultySite(emulator, tmp_path)
    yield site
    for cache in site.opened:
        cache.close()


def assert_all_right(cache: ShardCache) -> None:
    cache.plan(range(SHARDS))
    for index in range(SHARDS):
        assert np.array_equal(opened(cache, index), shard_tokens(index))


NO_HASH = frozenset({"x-goog-hash"})
Script = list[tuple[Callable[[Request], bool], Fault, int]]

# Name, what happens to which requests how often, and how many downloads that takes in all.
SURVIVED: dict[str, tuple[Script, int]] = {
    "nothing": ([], 5),
    "a late answer": ([(is_download, Fault(delay_s=0.2), 2)], 5),
    "a slow answer": ([(is_download, Fault(bytes_per_second=100_000), 2)], 5),
    "a flipped byte": ([(is_download, Fault(flip_byte=999), 1)], 6),
    "a flipped byte without a hash": (
        [(is_download, Fault(flip_byte=999, strip_headers=NO_HASH), 1)],
        6,
    ),
    "no hash": ([(is_download, Fault(strip_headers=NO_HASH), 5)], 5),
    "a cut": ([(is_download, Fault(cut_after=20_000), 1)], 6),
    "a cut, then a flipped byte in the resumed rest": (
        [(is_download, Fault(cut_after=20_000), 1), (is_resumed, Fault(flip_byte=7), 1)],
        7,
    ),
    "a flipped byte, then a cut and a clean rest": (
        [(is_download, Fault(flip_byte=7, cut_after=20_000), 1)],
        7,
    ),
    "cuts again and again with progress": ([(names_shard(0), Fault(cut_after=9000), 6)], 11),
    "a cut before the first byte": ([(is_download, Fault(cut_after=0), 2)], 7),
    "an answer that ends early and says so": ([(is_download, Fault(truncate_to=20_000), 1)], 6),
    "a stall": ([(is_download, Fault(stall_after=20_000, stall_s=1.5), 1)], 6),
    "a stall before the first byte": ([(is_download, Fault(stall_after=0, stall_s=1.5), 1)], 6),
    "a lost answer": ([(is_download, Fault(lose_reply=True), 2)], 7),
    "text instead of the object": ([(is_download, Fault(reply=GARBLED), 1)], 7),
    **{
        f"HTTP {status} twice": ([(is_download, Fault(status=status), 2)], 7)
        for status in (408, 429, 500, 502, 503, 504)
    },
    # Not worth an attempt by themselves, but the object is looked at and fetched once more.
    **{
        f"HTTP {status} once": ([(is_download, Fault(status=status), 1)], 6)
        for status in (400, 401, 403, 404, 410, 412)
    },
}


@pytest.mark.parametrize("fault", SURVIVED)
def test_the_tokens_are_right_and_nothing_is_fetched_twice(site, fault):
    script, downloads = SURVIVED[fault]
    cache = site.cache(fetch_threads=1)
    for when, what, times in script:
        site.proxy.script(when, what, times=times)
    assert_all_right(cache)
    assert len(site.downloads()) == downloads
    assert site.published() == [f"t_{i}.{kind}" for i in range(SHARDS) for kind in ("json", "npy")]


@pytest.mark.parametrize("range_bytes", [2000, shard_download.MIN_RANGE_BYTES])
def test_many_threads_through_many_faults(site, monkeypatch, range_bytes):
    monkeypatch.setattr(shard_download, "MIN_RANGE_BYTES", range_bytes)
    cache = site.cache(fetch_threads=8)
    for fault in (
        Fault(status=503),
        Fault(cut_after=5000),
        Fault(flip_byte=300),
        Fault(lose_reply=True),
        Fault(status=429),
        Fault(truncate_to=100),
    ):
        site.proxy.script(lambda request: request.is_download, fault, times=2)
    assert_all_right(cache)


@pytest.mark.parametrize("strip", [frozenset(), NO_HASH], ids=["with a hash", "without a hash"])
def test_a_shard_corrupt_for_good_stops_with_both_checksums_before_its_data(site, strip):
    cache = site.cache()
    site.proxy.script(names_shard(2), Fault(flip_byte=5, strip_headers=strip), times=10**6)
    with pytest.raises(ShardError) as raised:
        cache.open(2)
    assert "t_2.npy: it is corrupt." in str(raised.value)
    assert str(raised.value).count("crc32c 0x") == 2
    assert "expected" in str(raised.value)
    assert not [name for name in site.published() if name.startswith("t_2")]
    assert len(site.downloads()) == 2 * 4  # two attempts of four fresh starts
    assert np.array_equal(opened(cache, 3), shard_tokens(3))  # concerns that shard alone


@pytest.mark.parametrize("status", [400, 401, 412])
def test_a_download_that_is_always_refused_is_named_with_the_status(site, status):
    cache = site.cache(fetch_timeout_s=1.5)
    site.proxy.script(names_shard(1), Fault(status=status), times=10**6)
    with pytest.raises(
        ShardError, match=rf"t_1\.npy: .*(HTTP {status}|credentials of an anonymous client)"
    ):
        cache.open(1)


@pytest.mark.parametrize(
    "fault",
    [*(Fault(status=status) for status in (401, 404, 408, 503)), Fault(lose_reply=True)],
    ids=["401", "404", "408", "503", "lost"],
)
def test_an_unreachable_store_is_retried_then_reported_with_the_last_failure(site, fault):
    cache = site.cache(fetch_timeout_s=1.5)
    site.proxy.script(lambda request: True, fault, times=10**6)
    with pytest.raises(ShardError, match=r"t_0\.npy: .*nothing has been fetched.*last failure: "):
        cache.open(0)


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(status=404), Fault(reply=GARBLED)])
@pytest.mark.parametrize("metadata", ["too", "work"])
def test_an_outage_during_which_shards_are_fetched_ahead_costs_nothing(site, fault, metadata):
    cache = site.cache(fetch_timeout_s=60.0)
    assert np.array_equal(opened(cache, 0), shard_tokens(0))
    is_down = [True]
    site.proxy.script(
        lambda request: is_down[0] and (metadata == "too" or request.is_download),
        fault,
        times=10**6,
    )
    cache.plan(range(SHARDS))
    cut_off = len(site.proxy.requests) + SHARDS * 4 * 3  # three rounds of each shard
    until(lambda: len(site.proxy.requests) > cut_off)
    is_down[0] = False
    assert_all_right(cache)
