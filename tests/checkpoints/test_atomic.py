from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from refocused.checkpoints.atomic import FileLock, write_bytes_atomic, write_json_atomic


def test_a_write_replaces_the_whole_content_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_bytes_atomic(path, b"a long first content")
    write_json_atomic(path, {"step": 1})
    assert path.read_text() == '{\n "step": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json_atomic(path, {"loss": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json_atomic(path, {"loss": float("nan")})
    assert path.read_text() == '{\n "loss": 1.0\n}\n'


def test_a_lock_has_one_owner_and_is_free_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    code = (
        "import pathlib, sys, time\n"
        "from refocused.checkpoints.atomic import FileLock\n"
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
