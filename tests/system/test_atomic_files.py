import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from refocused.system.atomic_files import (
    open_regular,
    read_regular,
    replace_file,
    replace_folder,
    write_json_atomic,
)
from refocused.system.locks import FileLock, exclusive_folder


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("concurrent", [False, True])
def test_new_content_replaces_the_old_and_leaves_no_temporary_file(
    tmp_path: Path, durable: bool, concurrent: bool
) -> None:
    path = tmp_path / "x.json"
    if not concurrent:
        (tmp_path / ".x.json.part").write_bytes(b"what a killed writer left")
    for content in (b"old and longer", b"new", b""):
        replace_file(path, content, durable=durable, concurrent=concurrent)
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]


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


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json_atomic(path, {"loss": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, {"loss": float("nan")})
    assert path.read_text() == '{\n "loss": 1.0\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_replaced_despite_remains_of_a_killed_replacement(tmp_path: Path) -> None:
    for name in ("model", "fresh", ".model.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of {name}").touch()
    replace_folder(tmp_path / "fresh", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["of fresh"]


def test_writers_of_two_containers_have_temporary_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)
    used, replace = [], Path.replace

    def watched(source: Path, target: Path) -> Path:
        used.append(source.name)
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", watched)
    for content in (b"one", b"two"):
        replace_file(tmp_path / "x", content, concurrent=True)
    assert len(set(used)) == 2


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_an_error_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "manifest.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    for read in (open_regular, read_regular):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read(path)


def test_a_description_that_fills_the_memory_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match=r"1,099,511,627,776 bytes, more than"):
        read_regular(tmp_path / "manifest.json")


def test_a_lock_that_its_holder_removes_has_one_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (FileLock(tmp_path / "work" / "lock") for _ in range(3))
    holder = exclusive_folder(tmp_path / "work")
    holder.__enter__()
    lock = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        holder.__exit__(None, None, None)  # between the opening and the lock
        assert first.acquire()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert not second.acquire()
    first.release()
    assert third.acquire()
    assert not second.acquire()


def test_a_lock_has_one_owner_and_is_free_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    code = (
        "import pathlib, sys, time\n"
        "from refocused.system.locks import FileLock\n"
        "print(FileLock(pathlib.Path(sys.argv[1])).acquire(), flush=True)\n"
        "time.sleep(60)\n"
    )
    # The lock object is dropped by the child right away: only the descriptor keeps the lock.
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "True\n"
        assert not FileLock(path).acquire()
        owner.kill()
    lock = FileLock(path)
    assert lock.acquire()
    assert not FileLock(path).acquire()
    lock.release()
    assert FileLock(path).acquire()
