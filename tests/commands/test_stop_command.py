from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from refocused.commands import stop
from refocused.system.processes import identify, this_process


def run_with(folder: Path, *, when: int = 0, **state: object) -> Path:
    folder.mkdir(parents=True)
    file = folder / "state.json"
    me = this_process()
    known = {"status": "training", "pid": me.pid, "pid_started": me.started}
    file.write_text(json.dumps(known | state))
    os.utime(file, (1_000_000 + when,) * 2)
    return folder


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_running_run_is_asked_to_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(tmp_path / "sample")
    assert stop.main([str(run)]) == 0
    assert (run / "STOP").exists()
    assert capsys.readouterr().out == f"{run}: asked to stop; it saves after the step it is in.\n"


def test_a_name_is_looked_for_below_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_with(tmp_path / "runs" / "gpt2-a")
    assert stop.main(["gpt2-a"]) == 0
    assert (run / "STOP").exists()
    assert stop.main(["gpt2-b"]) == 2
    assert "gpt2-b: there is no such folder" in capsys.readouterr().err


def test_now_kills_the_process_that_trains_and_leaves_a_wish_against_restarts(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        identity = identify(child.pid)
        assert identity is not None
        run = run_with(tmp_path / "sample", pid=child.pid, pid_started=identity.started)
        assert stop.main([str(run), "--now", "--wait"]) == 0
        assert child.wait() == -signal.SIGKILL
    assert (run / "STOP").exists()


def test_another_process_that_got_the_pid_is_not_killed(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        run = run_with(tmp_path / "sample", pid=child.pid, pid_started=1)
        assert stop.main([str(run), "--now"]) == 1
        assert child.poll() is None
        child.kill()


def test_a_run_of_another_machine_gets_a_wish_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path / "sample", host="node-7")
    assert stop.main([str(run), "--now"]) == 2
    assert not (run / "STOP").exists()
    assert stop.main([str(run)]) == 0
    assert (run / "STOP").exists()
    assert "node-7" in capsys.readouterr().out


def test_without_a_name_the_newest_run_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_with(tmp_path / "runs" / "a", when=1)
    run_with(tmp_path / "runs" / "b", when=3)
    run_with(tmp_path / "runs" / "c", when=2)
    assert stop.main([]) == 0
    assert [path.name for path in tmp_path.glob("runs/*/STOP")] == ["STOP"]
    assert (tmp_path / "runs" / "b" / "STOP").exists()


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_a_run_that_has_ended_is_left_alone(
    tmp_path: Path, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(tmp_path / "sample", status=status)
    assert stop.main([str(run)]) == 1
    assert not (run / "STOP").exists()
    assert f"{run}: the run is not running (status: {status})." in capsys.readouterr().err


def test_a_run_whose_process_was_killed_is_not_running(tmp_path: Path, ended_pid: int) -> None:
    run = run_with(tmp_path / "sample", pid=ended_pid)
    assert stop.main([str(run)]) == 1
    assert not (run / "STOP").exists()


def test_a_folder_that_is_no_run_is_wrong_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stop.main([str(tmp_path)]) == 2
    assert f"{tmp_path}: no run with a state.json is there." in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b'{"status": "trai', b"\xff", b"[1]"])
def test_a_state_that_cannot_be_read_says_what_stops_the_run_all_the_same(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state.json").write_bytes(content)
    assert stop.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/state.json cannot be read (it is " in said
    assert f"`touch {tmp_path}/STOP`" in said
    assert not (tmp_path / "STOP").exists()


def test_without_any_run_there_is_nothing_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert stop.main([]) == 2
    assert "runs: no run with a state.json is there." in capsys.readouterr().err


def test_it_waits_until_the_run_says_that_it_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path / "sample")
    looks = []

    def pass_time(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            state = {"status": "stopped", "pid": os.getpid()}
            (run / "state.json").write_text(json.dumps(state))

    monkeypatch.setattr(stop.time, "sleep", pass_time)
    waiting = threading.Thread(target=stop.main, args=([str(run), "--wait"],), daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()
    assert len(looks) == 3
