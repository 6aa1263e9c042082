import subprocess
import sys
import time
from pathlib import Path

from refocused.system.locks import FileLock
from refocused.system.processes import ProcessIdentity, identify, this_process


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


def test_a_process_is_alive_until_it_ends_even_when_nobody_reaps_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = identify(child.pid)
        assert identity is not None
        assert identity.alive
        child.kill()
        while identity.alive:  # until the kernel has made it a zombie
            time.sleep(0.01)
        assert Path(f"/proc/{child.pid}").exists()
    assert identify(child.pid) is None


def test_another_process_with_the_same_pid_is_not_the_one_meant() -> None:
    me = this_process()
    assert me.alive
    assert not ProcessIdentity(pid=me.pid, started=me.started - 1).alive
