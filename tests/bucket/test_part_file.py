from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from refocused.bucket import partial_files
from refocused.bucket.partial_files import PartFile, free_bytes, part_path, require_space
from refocused.system.errors import BucketError


def test_what_arrived_is_on_its_way_to_the_disk_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(partial_files, "WRITE_BACK_BYTES", 30)
    monkeypatch.setattr(partial_files, "begin_write_back", lambda _, *part: sent.append(part))
    with PartFile(tmp_path / "x", total_bytes=200, resume=True) as part:
        for size in (5, 70, 10, 29):
            part.write(bytes(size))
        assert sent == [(0, 75), (75, 39)]
        part.restart()
        part.write(bytes(40))
    assert sent[2:] == [(0, 40)]


def test_a_disk_that_fills_up_is_told_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)  # where a network file system tells it
    with PartFile(tmp_path / "x", total_bytes=4, resume=True) as part:
        part.write(b"abcd")
        with pytest.raises(BucketError, match=r"No space left in .*: 4 bytes needed, [\d,]+ free"):
            part.publish()
    assert not (tmp_path / "x").exists()


def test_a_full_device_is_met_by_the_write(tmp_path: Path) -> None:
    part_path(tmp_path / "x").symlink_to("/dev/full")
    with (
        PartFile(tmp_path / "x", total_bytes=10, resume=False) as part,
        pytest.raises(BucketError, match="No space left"),
    ):
        part.write(b"abcd")


def test_space_is_looked_up_on_the_disk_of_a_folder_to_be(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") > 0
    require_space(tmp_path / "not" / "yet", needed_bytes=1)
    with pytest.raises(BucketError, match=r"1,000,000,000,000,000,000 bytes needed"):
        require_space(tmp_path, needed_bytes=10**18)
