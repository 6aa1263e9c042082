"""Fixtures of the cache's tests."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_site import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    for cache in site.opened:
        cache.close()
    assert not [t for t in threading.enumerate() if t.name == "shard fetch"]
