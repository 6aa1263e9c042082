import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from refocused.commands import monitor
from refocused.commands.main import run_command
from refocused.system.processes import identify, this_process

RUN = Path("runs/sample")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def stop(*arguments):
    return run_command("stop", [str(argument) for argument in arguments])


def run_with(folder=RUN, *, when=0, **state):
    folder.mkdir(parents=True)
    file = folder / "state.json"
    me = this_process()
    file.write_text(
        json.dumps({"status": "training", "pid": me.pid, "pid_started": me.started} | state)
    )
    os.utime(file, (1_000_000 + when,) * 2)
    return folder


@pytest.mark.parametrize("status", ["starting", "training", "failed"])
def test_a_run_that_starts_or_may_be_restarted_is_stopped(status, capsys):
    me, crashed = this_process(), {"pid": ended_pid()} if status != "starting" else {}
    above = {"pid": me.pid, "started": me.started}
    run = run_with(status=status, supervisor=above, **crashed)
    assert stop(run) == 0
    assert (run / "STOP").exists()
    told = "saves after its current step" if status == "training" else "has not begun to train"
    assert told in capsys.readouterr().out


def ended_pid():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


@pytest.mark.parametrize("names", [["sample"], ["runs/sample"], []])
def test_a_running_run_or_the_newest_is_asked_to_stop(names, capsys):
    run_with(Path("runs/older"), when=-1)
    run = run_with()
    assert stop(*names) == 0
    assert list(Path("runs").glob("*/STOP")) == [run / "STOP"]
    assert capsys.readouterr().out == f"{run}: stopping; it saves after its current step.\n"


def test_now_kills_the_process_that_trains_and_leaves_a_wish_against_restarts():
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = identify(child.pid)
        assert identity is not None
        run = run_with(pid=child.pid, pid_started=identity.started)
        assert stop(run, "--now", "--wait") == 0
        assert child.wait() == -signal.SIGKILL
    assert (run / "STOP").exists()


def test_another_process_that_got_the_pid_is_not_killed():
    with subprocess.Popen(["sleep", "60"]) as child:
        assert stop(run_with(pid=child.pid, pid_started=1), "--now") == 1
        assert child.poll() is None
        child.kill()


def test_it_waits_until_the_run_says_that_it_has_stopped(monkeypatch):
    run, looks = run_with(), []

    def pass_time(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            (run / "state.json").write_text(json.dumps({"status": "stopped", "pid": os.getpid()}))

    monkeypatch.setattr(monitor.time, "sleep", pass_time)
    waiting = threading.Thread(target=stop, args=(run, "--wait"), daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()
    assert len(looks) == 3
