from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from refocused.system.locks import FileLock


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
