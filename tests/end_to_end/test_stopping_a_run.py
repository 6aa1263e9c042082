"""Stopping a run in every way: the current step is saved."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from ranks import ROOT, Ended, ForkedRanks, metrics, train
from tiny import RUN_FOLDER as RUN
from tiny import STEPS, STOPPED, last_step, log_lines, losses, run_to_stop

from refocused.metrics.run_time import RunTimeReader

pytestmark = pytest.mark.slow
UNVALIDATED = [*STOPPED, "evaluation.interval=0"]
TO_THE_END = [*UNVALIDATED, "evaluation.sequences=8"]
STOP = [sys.executable, ROOT / "launch" / "stop.py", RUN]
Stop = Callable[[ForkedRanks, Path], object]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, str]:
    folder = run_to_stop(tmp_path_factory.mktemp("uninterrupted"))
    train(folder, *TO_THE_END, ranks=2)
    return losses(folder / RUN)


def stopped(folder: Path, *settings: str, stop: Stop, step: int = 7) -> Ended:
    """Start the run on two ranks, stop it when it has made so many steps, and wait for its end."""
    run_to_stop(folder)
    ranks = ForkedRanks(2, settings, folder=folder, command=train_and_look_often)
    with ranks:
        ranks.wait_until(lambda: last_step(folder / RUN) >= step)
        stop(ranks, folder)
        return ranks.wait(60)


def train_and_look_often(arguments: list[str]) -> int:
    from refocused.commands.train import main
    from refocused.system import spot_notice

    spot_notice.POLL_SECONDS = 0.02
    return main(arguments)


def check_stopped_and_resumable(folder: Path, ended: Ended, expected: Mapping[int, str]) -> int:
    """Check the files of a stopped run, resume to the end, and return the step of the stop."""
    assert ended.codes == [130, 130], ended.everything
    assert "Traceback" not in ended.everything
    run = folder / RUN
    stopped_at = last_step(run)
    assert stopped_at < STEPS
    checkpoints = run / "checkpoints"
    assert (checkpoints / f"checkpoint_step_{stopped_at}" / "manifest.json").exists()
    assert not list(checkpoints.glob(".*"))
    assert json.loads((run / "state.json").read_text())["status"] == "stopped"
    resumed = train(folder, *TO_THE_END, ranks=2)
    assert f"resume   step {stopped_at} " in resumed.out[0]
    assert losses(run) == expected
    return stopped_at


def until_the_end(ranks: ForkedRanks, folder: Path) -> None:
    """Send signals repeatedly: during the step, the save, and after it."""
    while any(process.poll() is None for process in ranks.processes):
        ranks.kill(signal.SIGTERM)
        time.sleep(0.003)


def by_the_command(ranks: ForkedRanks, folder: Path) -> None:
    """Ask for the stop, wait for it, and ask again when nothing runs."""
    ask = {"cwd": folder, "capture_output": True, "text": True, "timeout": 60}
    asked = subprocess.run([*STOP, "--wait"], **ask)
    assert asked.returncode == 0, asked.stderr
    assert json.loads((folder / RUN / "state.json").read_text())["status"] == "stopped"
    ranks.wait(30)
    nothing = subprocess.run([*STOP, "--wait"], **ask)
    assert (nothing.returncode, nothing.stderr.count("the run is not running")) == (1, 1)


WAYS: dict[str, tuple[Stop, str]] = {
    "SIGINT to both": (lambda ranks, _: ranks.kill(signal.SIGINT), "a signal"),
    "SIGTERM to one": (lambda ranks, _: ranks.processes[1].send_signal(signal.SIGTERM), "a signal"),
    "SIGTERM over and over": (until_the_end, "a signal"),
    "stop.py": (by_the_command, "the STOP file"),
    "a notice": (
        lambda _, folder: (folder / "preempted").touch(),
        "a notice that the machine will be taken away",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_saves_the_current_step(
    tmp_path: Path, uninterrupted: Mapping[int, str], way: str
) -> None:
    stop, cause = WAYS[way]
    notice = tmp_path / "preempted"
    ended = stopped(tmp_path, *UNVALIDATED, f"run.spot_notice={notice}", stop=stop)
    assert f"stopped by {cause}" in ended.out[0]
    assert ended.everything.count("stopping after this step and saving") <= 1
    assert (f"{notice} exists. The run saves and stops." in ended.everything) == notice.exists()
    (start,) = (
        line for line in log_lines(tmp_path / RUN, "performance_metrics") if line["kind"] == "start"
    )
    phases = {f"{name}_seconds" for name in ("imports", "join", "engine", "first_step")}
    assert phases <= start.keys()
    assert " from the start to step 1: " in ended.out[0]
    check_stopped_and_resumable(tmp_path, ended, uninterrupted)


def freeze_inside_a_save(ranks: ForkedRanks, checkpoints: Path) -> None:
    """Pause the ranks during a save."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if list(checkpoints.glob(".tmp-*")):
            ranks.kill(signal.SIGSTOP)
            time.sleep(0.05)  # until all threads are paused
            if list(checkpoints.glob(".tmp-*/zero")):
                return
            ranks.kill(signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError(ranks.printed())


@pytest.mark.parametrize("in_background", ["false", "true"])
def test_a_signal_during_a_save_lets_it_finish(
    tmp_path: Path, uninterrupted: Mapping[int, str], in_background: str
) -> None:
    checkpoints, halves = tmp_path / RUN / "checkpoints", list[Path]()

    def stop(ranks: ForkedRanks, folder: Path) -> None:
        freeze_inside_a_save(ranks, checkpoints)
        halves.extend(checkpoints.glob(".tmp-*"))
        ranks.kill(signal.SIGTERM)
        ranks.kill(signal.SIGCONT)

    saving = ["checkpoint.interval=3", f"checkpoint.async={in_background}"]
    ended = stopped(tmp_path, *UNVALIDATED, *saving, stop=stop, step=0)
    assert "stopped by a signal" in ended.out[0]
    (half,) = halves
    name = half.name.removeprefix(".tmp-").rpartition("-")[0]
    assert (checkpoints / name / "manifest.json").exists()  # the save was finished
    check_stopped_and_resumable(tmp_path, ended, uninterrupted)


def test_a_signal_cuts_validation_short(tmp_path: Path, uninterrupted: Mapping[int, str]) -> None:
    stop, _ = WAYS["SIGINT to both"]
    ended = stopped(tmp_path, *STOPPED, "evaluation.interval=8", stop=stop, step=8)
    assert not metrics(tmp_path / RUN, "validation")
    assert check_stopped_and_resumable(tmp_path, ended, uninterrupted) == 8


def test_a_signal_before_the_first_step_exits_without_a_checkpoint(tmp_path: Path) -> None:
    with ForkedRanks(2, STOPPED, folder=run_to_stop(tmp_path)) as ranks:
        ranks.wait_until(lambda: "ZeRO-3" in ranks.printed())  # its handlers are installed by then
        ranks.kill(signal.SIGTERM)
        ended = ranks.wait(30)
    assert ended.codes == [130, 130], ended.everything
    assert ended.err[0].count("Stopped by a signal before training began") == 1
    assert "Traceback" not in ended.everything and "step 0" not in ended.everything
    assert not (tmp_path / RUN / "checkpoints").exists()


def test_a_stop_while_ranks_join_is_not_lost(tmp_path: Path) -> None:
    state = run_to_stop(tmp_path) / RUN / "state.json"
    with ForkedRanks(2, STOPPED, folder=tmp_path) as ranks:
        ranks.processes[1].send_signal(signal.SIGSTOP)  # the other one waits for it
        ranks.wait_until(state.exists)
        assert json.loads(state.read_text())["phase"] == "waits for all ranks"
        subprocess.run(STOP, cwd=tmp_path, check=True, timeout=60)
        ranks.kill(signal.SIGCONT)
        ended = ranks.wait(60)
    assert ended.codes == [130, 130], ended.everything
    assert "Stopped by the STOP file before training began" in ended.err[0]
    assert not state.exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_stops_all_and_the_same_command_resumes(
    tmp_path: Path, uninterrupted: Mapping[int, str], victim: int
) -> None:
    def kill(ranks: ForkedRanks, _: Path) -> None:
        ranks.processes[victim].send_signal(signal.SIGKILL)

    ended = stopped(tmp_path, *UNVALIDATED, "checkpoint.interval=5", stop=kill, step=8)
    assert ended.codes[victim] == -signal.SIGKILL
    assert ended.codes[1 - victim] == 1, ended.everything
    assert "Traceback" not in ended.everything
    assert ended.err[1 - victim].count("Another rank ended and closed its connection") == 1
    resumed = train(tmp_path, *TO_THE_END, ranks=2)
    assert "resume   step 5 " in resumed.out[0] or "resume   step 10 " in resumed.out[0]
    assert losses(tmp_path / RUN) == uninterrupted


def test_a_budget_ends_all_sessions_and_a_time_limit_this_one(tmp_path: Path) -> None:
    run = run_to_stop(tmp_path) / RUN
    settings = [*UNVALIDATED, "run.steps=100000", "cost.per_hour_usd=3600"]  # a dollar a second
    first = train(tmp_path, *settings, "cost.budget_usd=6", ranks=2, code=4)
    assert "stopped by cost.budget_usd" in first.out[0]
    step = last_step(run)
    state = json.loads((run / "state.json").read_text())
    assert (state["exit_code"], state["stopped_by"], state["step"]) == (4, "BUDGET", step)

    spent = train(tmp_path, *settings, "cost.budget_usd=6", ranks=2, code=4)
    assert last_step(run) == step  # earlier cost counts: nothing is loaded
    assert "Nothing was started: the run has cost $" in spent.err[0]
    assert json.loads((run / "state.json").read_text()) == state

    late = train(tmp_path, *settings, "run.time_limit_hours=1e-6", ranks=2, code=4)
    assert "stopped by run.time_limit_hours" in late.out[0]
    assert not (run / "STOP").exists()
    used = RunTimeReader(run).read()
    assert used.sessions == 2
    # Every second of each session is accounted for, at one dollar.
    assert used.seconds_trained == pytest.approx(used.spent.total_seconds, abs=0.1)
    assert used.cost_usd == pytest.approx(used.seconds_trained)
    last = json.loads((run / "state.json").read_text())
    assert last["cost_usd"] == pytest.approx(used.cost_usd, abs=0.1)
    assert "goodput " in first.out[0]
