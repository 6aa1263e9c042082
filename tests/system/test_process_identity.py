from __future__ import annotations

import subprocess
import time
from pathlib import Path

from refocused.system.processes import ProcessIdentity, identify, this_process


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
