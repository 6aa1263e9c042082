"""Killing the launcher (deepspeed, torchrun, the supervisor): the state is saved."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ranks import ROOT, TRAIN, carrying, free_port, is_running, until
from stopped_run import RUN, SETTINGS, last_step, prepared

pytestmark = pytest.mark.slow


LAUNCHERS = {
    "deepspeed": ["--num_gpus", "2", "--master_port"],
    "torchrun": ["--nproc-per-node", "2", "--master-port"],
}


@contextlib.contextmanager
def launched(
    folder: Path, *arguments: str, by: str = "deepspeed"
) -> Iterator[subprocess.Popen[bytes]]:
    """The real launcher with two ranks; processes with its environment are killed at the end."""
    command = [Path(sys.executable).with_name(by), *LAUNCHERS[by], str(free_port())]
    with (folder / "launcher.out").open("wb") as out:
        process = subprocess.Popen(
            [*command, TRAIN, *arguments],
            cwd=folder,
            env={
                **os.environ,
                **{"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TMPDIR": str(folder)},
            },
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            for one in carrying("TMPDIR", str(folder)):
                one.kill()
            process.wait()


def is_rank(process: psutil.Process) -> bool:
    """Whether a process is a rank, and nothing that a rank started."""
    with contextlib.suppress(psutil.Error):
        if "RANK" in process.environ() and str(TRAIN) in process.cmdline():
            above = process.parent()  # a rank's child has its command until it runs its own
            return above is None or "RANK" not in above.environ()
    return False


@pytest.mark.parametrize(
    ("launcher", "number", "stopped"),
    [("deepspeed", signal.SIGTERM, True), ("torchrun", signal.SIGKILL, False)],
)
def test_ranks_save_and_stop_when_their_launcher_dies(
    launcher: str, number: signal.Signals, stopped: bool, tmp_path: Path
) -> None:
    folder = prepared(tmp_path)
    log = folder / "launcher.out"
    state = folder / RUN / "state.json"
    settings = [*SETTINGS, "run.steps=100000", "run.device=cpu", "evaluation.interval=0"]
    with launched(folder, *settings, by=launcher) as process:
        until(lambda: last_step(folder / RUN) >= 7 or process.poll() is not None, seconds=120)
        assert process.poll() is None, log.read_text()
        rank_0 = json.loads(state.read_text())["pid"]
        ranks = [one for one in carrying("TMPDIR", str(folder)) if is_rank(one)]
        (rank_1,) = (one.pid for one in ranks if one.pid != rank_0)
        if stopped:
            os.kill(rank_1, signal.SIGSTOP)
        process.send_signal(number)
        process.wait(60)
        until(lambda: not any(is_running(one) for one in ranks), said=log.read_text)
    said = log.read_text()
    assert "stopped by the launcher is gone" in said
    assert (f"Rank 1 (process {rank_1}) is stopped" in said) == stopped
    assert "Traceback" not in said and "FutureWarning" not in said
    stopped_at = last_step(folder / RUN)
    saved = folder / RUN / "checkpoints" / f"checkpoint_step_{stopped_at}" / "manifest.json"
    assert saved.exists(), said
    assert json.loads(state.read_text())["status"] == "stopped"


def handles(process: psutil.Process, number: signal.Signals) -> bool:
    """Whether a process has a handler of a signal."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", text, re.MULTILINE)
    return bool(int(caught, 16) >> number - 1 & 1)


@pytest.mark.parametrize(("launcher", "joins"), [("deepspeed", False), ("torchrun", True)])
def test_ranks_end_when_their_launcher_dies_while_they_start(
    launcher: str, joins: bool, tmp_path: Path
) -> None:
    folder = prepared(tmp_path)
    with launched(folder, *SETTINGS, "run.device=cpu", by=launcher):
        ranks: dict[str, psutil.Process] = {}
        while len(ranks) < 2:
            found = carrying("TMPDIR", str(folder))
            ranks = {one.environ()["RANK"]: one for one in found if is_rank(one)}
        until(lambda: all(handles(one, signal.SIGUSR2) for one in ranks.values()))
        if joins:  # rank 0 waits for rank 1, inside torch
            ranks["1"].send_signal(signal.SIGSTOP)
            until(lambda: handles(ranks["0"], signal.SIGTERM))
        os.kill(ranks["0"].ppid(), signal.SIGKILL)
        until(lambda: not any(is_running(one) for one in ranks.values()))
    said = (folder / "launcher.out").read_text()
    assert ("Stopped by the launcher is gone before training began" in said) == joins
    assert not (folder / RUN / "state.json").exists()


def test_the_supervisor_restarts_after_a_crash_and_ctrl_c_saves(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    log, state = folder / "launcher.out", folder / RUN / "state.json"
    command = [
        *(sys.executable, "-P", "-m", "refocused.commands.launch", "--restarts", "1"),
        *(*SETTINGS, "run.steps=100000", "run.device=cpu", "evaluation.interval=0"),
        "checkpoint.interval=5",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={
                **os.environ,
                **{"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "RANKS": "2"},
                **{"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
            },
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: last_step(folder / RUN) >= 7 or process.poll() is not None, seconds=180)
        rank_0 = json.loads(state.read_text())["pid"]
        os.kill(rank_0, signal.SIGKILL)
        until(
            lambda: json.loads(state.read_text())["pid"] != rank_0 or process.poll() is not None,
            seconds=180,
        )
        begun = last_step(folder / RUN)
        until(lambda: last_step(folder / RUN) > begun or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    finally:
        for one in carrying("TMPDIR", str(folder)):
            one.kill()
    said = log.read_text()
    assert code == 130, said
    assert "Rank 0 was killed" in said and "Restarting from step" in said
    assert re.search(r"start-up .+ from a crash to step \d+: exit .+ launch .+ imports ", said)
    assert "stopping after this step and saving; 300 s" in said
    assert "Traceback" not in said and "exits with return code" not in said
    assert f"resume: RANKS=2 {ROOT}/launch/train.sh --restarts 1 --config tiny.yaml" in said
    assert list(carrying("TMPDIR", str(folder))) == []
    stopped_at = last_step(folder / RUN)
    checkpoint = folder / RUN / "checkpoints" / f"checkpoint_step_{stopped_at}"
    assert (checkpoint / "manifest.json").exists(), said
