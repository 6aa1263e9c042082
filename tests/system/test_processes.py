"""What identifies a process, and what a rank notes for its watchdog."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from refocused.system.processes import ProcessIdentity, identify, this_process
from refocused.system.progress import Place, Progress, open_collectives

RANK = """
import os, threading, time
from refocused.system.processes import this_process
from refocused.system.progress import Place, Progress
progress = Progress.shared()
def attend():
    while True:
        order = progress.beat(lambda: b'{}')
        if order:
            print(order[1], flush=True)
            os._exit(order[0])
        time.sleep(0.05)
threading.Thread(target=attend, daemon=True).start()
progress.step(7)
with progress.doing("save"), progress.calling("gather"):
    place = {"rank": 0, "node": 0, "host": "a", "process": this_process()}
    print(Place(**place, files=progress.files).model_dump_json(), flush=True)
    time.sleep(600)
"""


def test_a_moment_shows_activity_call_and_changes() -> None:
    progress = Progress()
    assert progress.moment().activity == "start-up"
    progress.step(5)
    with progress.doing("validation"):
        with progress.calling("largest"):
            inside = progress.moment()
        between = progress.moment()
    after = progress.moment()
    seen = inside.step, inside.activity, inside.call, inside.calls
    assert seen == (5, "validation", "largest", 1)
    assert (between.activity, between.call) == ("validation", "")
    assert (after.activity, after.taken) == ("step", 1)
    assert inside.changes < between.changes < after.changes
    assert progress.files is None  # nobody else can read it
    with pytest.raises(ValueError, match="lost"), progress.calling("gather"):
        raise ValueError("lost")
    assert progress.moment().call == ""


def test_another_process_reads_a_rank_and_makes_it_exit() -> None:
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        place = Place.model_validate_json(rank.stdout.readline())
        assert place.process == identify(rank.pid)
        seen = Progress.of(place)
        moment = seen.moment()
        assert (moment.step, moment.activity, moment.call) == (7, "save", "gather")
        assert seen.collectives() is None
        seen.asked = 1
        while seen.collectives() is None:
            time.sleep(0.01)
        assert seen.collectives() == []
        os.kill(rank.pid, signal.SIGSTOP)
        seen.order(6, "why")
        assert rank.poll() is None
        os.kill(rank.pid, signal.SIGCONT)
        assert rank.stdout.read() == "why\n"
        assert rank.wait(30) == 6
    with pytest.raises(OSError, match="No such"):
        Progress.of(place)


def test_collectives_that_are_not_complete_are_named() -> None:
    entry = {
        **{"profiling_name": "nccl:_all_gather_base", "collective_seq_id": 812, "pg_id": 0},
        **{"process_group": ["0", "default_pg"], "input_sizes": [[4096]], "state": "started"},
        "retired": False,
    }
    entries = [
        {**entry, "retired": True, "state": "completed", "collective_seq_id": 811},
        {**entry, "state": "completed", "collective_seq_id": 811},
        entry,
    ]
    found = open_collectives(json.dumps({"entries": entries}).encode())
    assert found == ["nccl:_all_gather_base number 812 of group 0, sizes [[4096]]"]
    assert open_collectives(b"{}") == []


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
