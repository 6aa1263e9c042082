from __future__ import annotations

import os
import time
from pathlib import Path

from refocused.data.cache.fetch_heartbeat import REQUEST_SECONDS, FetcherFiles


def test_requests_last_for_a_while_and_can_be_withdrawn(tmp_path: Path) -> None:
    files = FetcherFiles(tmp_path)
    for index in (3, 1, 2):
        files.request(index)
    files.withdraw(2)
    now = time.time()
    assert files.requests(now=now) == [1, 3]
    os.utime(tmp_path / "asked" / "3", (now, now - REQUEST_SECONDS))
    assert files.requests(now=now) == [1]
    assert not (tmp_path / "asked" / "3").exists()


def test_a_request_withdrawn_while_requests_are_collected_is_no_fault(tmp_path: Path) -> None:
    files = FetcherFiles(tmp_path)
    files.request(1)
    # Listed, and gone when it is looked at: what another rank's withdrawal in between looks like.
    (tmp_path / "asked" / "2").symlink_to(tmp_path / "gone")
    assert files.requests(now=time.time()) == [1]
