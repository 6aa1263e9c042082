"""Killing the launcher (deepspeed, torchrun, the supervisor): the state is saved."""

import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from ranks import ROOT, TRAIN, carrying, free_port, is_running, launched, until
from tiny import RUN_FOLDER as RUN
from tiny import STOPPED, last_step, run_to_stop

pytestmark = pytest.mark.slow
ENDLESS = [*STOPPED, "run.steps=100000", "run.device=cpu", "evaluation.interval=0"]


def command(launcher: str, *arguments: str) -> list[str]:
    """Return the command that starts two ranks by a launcher."""
    options = {
        "deepspeed": ["--num_gpus", "2", "--master_port"],
        "torchrun": ["--nproc-per-node", "2", "--master-port"],
    }[launcher]
    program = str(Path(sys.executable).with_name(launcher))
    return [program, *options, str(free_port()), str(TRAIN), *arguments]


def is_rank(process: psutil.Process) -> bool:
    """Whether a process is a rank, and nothing that a rank started."""
    with contextlib.suppress(psutil.Error):
        if "RANK" in process.environ() and str(TRAIN) in process.cmdline():
            above = process.parent()  # a rank's child has its command until it runs its own
            return above is None or "RANK" not in above.environ()
    return False


def check_saved(folder: Path, printed: str) -> None:
    """Check that the last step was saved."""
    name = f"checkpoint_step_{last_step(folder / RUN)}"
    assert (folder / RUN / "checkpoints" / name / "manifest.json").exists(), printed


@pytest.mark.parametrize(
    ("launcher", "number", "freezes"),
    [("deepspeed", signal.SIGTERM, True), ("torchrun", signal.SIGKILL, False)],
)
def test_ranks_save_and_stop_when_their_launcher_dies(
    launcher: str, number: signal.Signals, freezes: bool, tmp_path: Path
) -> None:
    state = run_to_stop(tmp_path) / RUN / "state.json"
    with launched(tmp_path, *command(launcher, *ENDLESS)) as (process, log):
        until(lambda: last_step(tmp_path / RUN) >= 7 or process.poll() is not None, seconds=120)
        assert process.poll() is None, log.read_text()
        rank_0 = json.loads(state.read_text())["pid"]
        ranks = list(filter(is_rank, carrying("TMPDIR", str(tmp_path))))
        (rank_1,) = (rank.pid for rank in ranks if rank.pid != rank_0)
        if freezes:
            os.kill(rank_1, signal.SIGSTOP)
        process.send_signal(number)
        process.wait(60)
        until(lambda: not any(map(is_running, ranks)), said=log.read_text)
    printed = log.read_text()
    assert "stopped by the launcher is gone" in printed
    assert (f"Rank 1 (process {rank_1}) is stopped" in printed) == freezes
    assert "Traceback" not in printed and "FutureWarning" not in printed
    check_saved(tmp_path, printed)
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
    run_to_stop(tmp_path)
    with launched(tmp_path, *command(launcher, *STOPPED, "run.device=cpu")) as (_, log):
        ranks: dict[str, psutil.Process] = {}
        while len(ranks) < 2:
            started = filter(is_rank, carrying("TMPDIR", str(tmp_path)))
            ranks = {rank.environ()["RANK"]: rank for rank in started}
        until(lambda: all(handles(rank, signal.SIGUSR2) for rank in ranks.values()))
        if joins:  # rank 0 waits for rank 1, inside torch
            ranks["1"].send_signal(signal.SIGSTOP)
            until(lambda: handles(ranks["0"], signal.SIGTERM))
        os.kill(ranks["0"].ppid(), signal.SIGKILL)
        until(lambda: not any(map(is_running, ranks.values())))
    printed = log.read_text()
    assert ("Stopped by the launcher is gone before training began" in printed) == joins
    assert not (tmp_path / RUN / "state.json").exists()


def test_the_supervisor_restarts_after_a_crash_and_ctrl_c_saves(tmp_path: Path) -> None:
    state = run_to_stop(tmp_path) / RUN / "state.json"
    supervisor = [sys.executable, "-P", "-m", "refocused.commands.launch", "--restarts", "1"]
    words = [*supervisor, *ENDLESS, "checkpoint.interval=5"]
    with launched(tmp_path, *words, RANKS="2") as (process, log):

        def wait_for_step(step: int) -> None:
            until(
                lambda: last_step(tmp_path / RUN) >= step or process.poll() is not None, seconds=180
            )

        def rank_0() -> int:
            return int(json.loads(state.read_text())["pid"])

        wait_for_step(7)
        os.kill(killed := rank_0(), signal.SIGKILL)
        until(lambda: rank_0() != killed or process.poll() is not None, seconds=180)
        wait_for_step(last_step(tmp_path / RUN) + 1)
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
        left = list(carrying("TMPDIR", str(tmp_path)))
    printed = log.read_text()
    assert code == 130 and not left, printed
    assert "Rank 0 was killed" in printed and "Restarting from step" in printed
    assert re.search(r"start-up .+ from a crash to step \d+: exit .+ launch .+ imports ", printed)
    assert "stopping after this step and saving; 300 s" in printed
    assert "Traceback" not in printed and "exits with return code" not in printed
    assert f"resume: RANKS=2 {ROOT}/launch/train.sh --restarts 1 --config tiny.yaml" in printed
    check_saved(tmp_path, printed)
