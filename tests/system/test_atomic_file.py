from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from refocused.system import atomic_files
from refocused.system.atomic_files import begin_write_back, replace_file


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("rivals", [False, True])
def test_the_new_content_takes_the_place_of_the_old_and_nothing_is_left(
    tmp_path: Path, durable: bool, rivals: bool
) -> None:
    path = tmp_path / "x.json"
    for content in (b"old and longer", b"new", b""):
        replace_file(path, content, durable=durable, rivals=rivals)
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    path = tmp_path / "x"
    contents = [bytes([number]) * 100_000 for number in range(2)]
    replace_file(path, contents[0])
    ended = threading.Event()

    def write() -> None:
        for number in range(300):
            replace_file(path, contents[number % 2])
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not ended.is_set():
        assert path.read_bytes() in contents
    writer.join()


def test_a_disk_that_cannot_be_written_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "x"
    replace_file(path, b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new", durable=True)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "x"
    (tmp_path / ".x.part").write_bytes(b"a half of a much longer content")
    replace_file(path, b"whole")
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


def test_the_kernel_is_asked_in_a_way_that_it_understands(tmp_path: Path) -> None:
    sync = atomic_files._sync_file_range()
    assert sync is not None  # on Linux
    with (tmp_path / "file").open("wb") as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        assert sync(file.fileno(), 0, 1 << 20, atomic_files._SYNC_FILE_RANGE_WRITE) == 0


def test_a_hint_that_cannot_be_taken_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_write_back(-1, 0, 10)  # no such file
    monkeypatch.setattr(atomic_files, "_sync_file_range", lambda: None)
    begin_write_back(-1, 0, 10)
