from __future__ import annotations

import errno
import os
import resource
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from refocused.bucket.bucket import crc32c_of
from refocused.engine import checksum_writer
from refocused.engine.checksum_writer import HashingWriter, WrittenFile, copy_hashed, save_hashed

CONTENT: dict[str, Any] = {"weights": torch.arange(100_000), "names": ["a", "b"]}


@pytest.fixture
def small_files() -> Iterator[None]:
    """The kernel refuses to let a file grow beyond 64 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_file_is_what_was_saved_and_its_digest_is_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "shard.pt"
    written = save_hashed(CONTENT, path)
    assert written == WrittenFile(path, path.stat().st_size, crc32c_of(path))
    read = torch.load(path, weights_only=True)
    assert torch.equal(read["weights"], CONTENT["weights"])
    assert read["names"] == CONTENT["names"]


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "shard.pt").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        save_hashed(CONTENT, tmp_path / "shard.pt")
    assert (tmp_path / "shard.pt").read_bytes() == b"precious"


def test_the_systems_own_error_is_raised_and_not_torchs(tmp_path: Path, small_files: None) -> None:
    with pytest.raises(OSError) as caught:
        save_hashed(CONTENT, tmp_path / "shard.pt")
    assert caught.value.errno == errno.EFBIG


def test_writing_goes_on_into_the_void_after_the_first_failure() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        writer = HashingWriter(full)
        assert writer.write(b"12345") == 5
        assert writer.error is not None
        first = writer.error
        assert first.errno == errno.ENOSPC
        assert writer.write(memoryview(b"678")) == 3
        writer.flush()
        assert writer.error is first
        assert writer.size == 8


def test_a_failure_at_the_last_flush_counts_too() -> None:
    full = Path("/dev/full").open("wb")  # noqa: SIM115 - closing it fails, by design
    writer = HashingWriter(full)
    writer.write(b"buffered")
    assert writer.error is None
    writer.flush()
    assert writer.error is not None and writer.error.errno == errno.ENOSPC
    with pytest.raises(OSError):
        full.close()


def test_the_archive_has_no_second_checksum_and_others_keep_theirs(tmp_path: Path) -> None:
    save_hashed(CONTENT, tmp_path / "ours.pt")
    torch.save(CONTENT, tmp_path / "theirs.pt")
    with zipfile.ZipFile(tmp_path / "ours.pt") as ours:
        assert {entry.CRC for entry in ours.infolist()} == {0}
    with zipfile.ZipFile(tmp_path / "theirs.pt") as theirs:
        assert theirs.testzip() is None
        assert any(entry.CRC for entry in theirs.infolist())


def test_one_state_is_saved_to_the_same_bytes_twice(tmp_path: Path) -> None:
    first, second = save_hashed(CONTENT, tmp_path / "1.pt"), save_hashed(CONTENT, tmp_path / "2.pt")
    assert first.crc32c == second.crc32c


def test_all_but_the_tail_is_on_its_way_before_the_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(checksum_writer, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(checksum_writer, "WRITE_BACK_BYTES", 3000)
    monkeypatch.setattr(checksum_writer, "begin_write_back", lambda _, *part: sent.append(part))
    with (tmp_path / "file").open("wb") as file:
        writer = HashingWriter(file)
        for size in (500, 7000, 100, 2900):
            writer.write(os.urandom(size))
        writer.flush()
    assert sent == [(0, 3500), (3500, 3000), (6500, 3100)]
    assert writer.crc32c == crc32c_of(tmp_path / "file")
    assert writer.size == (tmp_path / "file").stat().st_size == 10_500


def test_a_copied_file_is_its_original_with_its_digest(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "below" / "target"
    source.write_bytes(os.urandom(checksum_writer.BLOCK_BYTES + 7))
    assert copy_hashed(source, target) == WrittenFile(
        target, checksum_writer.BLOCK_BYTES + 7, crc32c_of(source)
    )
    assert target.read_bytes() == source.read_bytes()
