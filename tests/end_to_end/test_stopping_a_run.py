"""Stopping a run in every way: the current step is saved."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import ROOT, Ended, ForkedRanks, metrics, train
from stopped_run import RUN, SETTINGS, STEPS, last_step, prepared
from tiny import losses

from refocused.metrics.run_time import PERFORMANCE_FILE, RunTimeReader

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = prepared(tmp_path_factory.mktemp("uninterrupted"))
    train(folder, *SETTINGS, "evaluation.interval=0", "evaluation.sequences=8", ranks=2)
    return losses(folder / RUN)


def check_stopped_and_resumable(folder: Path, ended: Ended, wanted: dict[int, str]) -> int:
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
    resumed = train(folder, *SETTINGS, "evaluation.interval=0", "evaluation.sequences=8", ranks=2)
    assert f"resume   step {stopped_at} " in resumed.out[0]
    assert losses(run) == wanted
    return stopped_at


def signal_both(ranks: ForkedRanks, number: signal.Signals) -> None:
    ranks.kill(number)


def signal_one(ranks: ForkedRanks, number: signal.Signals) -> None:
    ranks.processes[1].send_signal(number)


def signal_until_the_end(ranks: ForkedRanks, number: signal.Signals) -> None:
    """Send signals repeatedly: during the step, the save, and after it."""
    while any(process.poll() is None for process in ranks.processes):
        ranks.kill(number)
        time.sleep(0.003)


@pytest.mark.parametrize(
    ("number", "send"),
    [
        (signal.SIGINT, signal_both),
        (signal.SIGTERM, signal_one),
        (signal.SIGTERM, signal_until_the_end),
    ],
    ids=["SIGINT to both", "SIGTERM to one", "SIGTERM over and over"],
)
def test_a_signal_saves_the_current_step(
    tmp_path: Path,
    uninterrupted: dict[int, str],
    number: signal.Signals,
    send: Callable[[ForkedRanks, signal.Signals], None],
) -> None:
    folder = prepared(tmp_path)
    ranks = ForkedRanks(2, [*SETTINGS, "evaluation.interval=0"], folder=folder)
    ranks.wait_until(lambda: last_step(folder / RUN) >= 7)
    send(ranks, number)
    ended = ranks.wait(30)
    assert "stopped by a signal" in ended.out[0]
    assert ended.everything.count("stopping after this step and saving") <= 1
    check_stopped_and_resumable(folder, ended, uninterrupted)


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
    tmp_path: Path, uninterrupted: dict[int, str], in_background: str
) -> None:
    folder = prepared(tmp_path)
    saving = ["evaluation.interval=0", "checkpoint.interval=3", f"checkpoint.async={in_background}"]
    ranks = ForkedRanks(2, [*SETTINGS, *saving], folder=folder)
    checkpoints = folder / RUN / "checkpoints"
    freeze_inside_a_save(ranks, checkpoints)
    (half,) = checkpoints.glob(".tmp-*")
    ranks.kill(signal.SIGTERM)
    ranks.kill(signal.SIGCONT)
    ended = ranks.wait(30)
    assert "stopped by a signal" in ended.out[0]
    name = half.name.removeprefix(".tmp-").rpartition("-")[0]
    assert (checkpoints / name / "manifest.json").exists()  # the save was finished
    check_stopped_and_resumable(folder, ended, uninterrupted)


def test_a_signal_cuts_validation_short(tmp_path: Path, uninterrupted: dict[int, str]) -> None:
    folder = prepared(tmp_path)
    ranks = ForkedRanks(2, [*SETTINGS, "evaluation.interval=8"], folder=folder)
    ranks.wait_until(lambda: last_step(folder / RUN) == 8)
    ranks.kill(signal.SIGTERM)
    ended = ranks.wait(30)
    assert not metrics(folder / RUN, "validation")
    assert check_stopped_and_resumable(folder, ended, uninterrupted) == 8


def test_stop_py_saves_and_waits(tmp_path: Path, uninterrupted: dict[int, str]) -> None:
    folder = prepared(tmp_path)
    ranks = ForkedRanks(2, [*SETTINGS, "evaluation.interval=0"], folder=folder)
    ranks.wait_until(lambda: last_step(folder / RUN) >= 7)
    command = [sys.executable, ROOT / "launch" / "stop.py", RUN, "--wait"]
    asked = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0, asked.stderr
    assert json.loads((folder / RUN / "state.json").read_text())["status"] == "stopped"
    ended = ranks.wait(30)
    assert "stopped by the STOP file" in ended.out[0]
    check_stopped_and_resumable(folder, ended, uninterrupted)
    nothing = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert (nothing.returncode, nothing.stderr.count("the run is not running")) == (1, 1)


def records(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / PERFORMANCE_FILE).read_text().splitlines()]


def train_and_look_often(arguments: list[str]) -> int:
    from refocused.commands.train import main
    from refocused.system import spot_notice

    spot_notice.POLL_SECONDS = 0.02
    return main(arguments)


def test_a_notice_that_the_machine_goes_saves_first(
    tmp_path: Path, uninterrupted: dict[int, str]
) -> None:
    folder, notice = prepared(tmp_path), tmp_path / "preempted"
    settings = [*SETTINGS, "evaluation.interval=0", f"run.spot_notice={notice}"]
    ranks = ForkedRanks(2, settings, folder=folder, command=train_and_look_often)
    ranks.wait_until(lambda: last_step(folder / RUN) >= 7)
    notice.touch()
    ended = ranks.wait(60)
    assert "stopped by a notice that the machine will be taken away" in ended.out[0]
    assert f"{notice} exists. The run saves and stops." in ended.everything
    (start,) = (one for one in records(folder / RUN) if one["kind"] == "start")
    phases = {f"{name}_seconds" for name in ("imports", "join", "engine", "first_step")}
    assert phases <= start.keys()
    assert " from the start to step 1: " in ended.out[0]
    check_stopped_and_resumable(folder, ended, uninterrupted)


def test_a_signal_before_the_first_step_exits_without_a_checkpoint(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    ranks = ForkedRanks(2, SETTINGS, folder=folder)
    ranks.wait_until(lambda: "ZeRO-3" in ranks.printed())  # its handlers are installed by then
    ranks.kill(signal.SIGTERM)
    ended = ranks.wait(30)
    assert ended.codes == [130, 130], ended.everything
    assert ended.err[0].count("Stopped by a signal before training began") == 1
    assert "Traceback" not in ended.everything and "step 0" not in ended.everything
    assert not (folder / RUN / "checkpoints").exists()


def test_a_stop_while_ranks_join_is_not_lost(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    ranks, state = ForkedRanks(2, SETTINGS, folder=folder), folder / RUN / "state.json"
    ranks.processes[1].send_signal(signal.SIGSTOP)  # the other one waits for it
    ranks.wait_until(state.exists)
    assert json.loads(state.read_text())["phase"] == "waits for all ranks"
    command = [sys.executable, ROOT / "launch" / "stop.py", RUN]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    ranks.kill(signal.SIGCONT)
    ended = ranks.wait(60)
    assert ended.codes == [130, 130], ended.everything
    assert "Stopped by the STOP file before training began" in ended.err[0]
    assert not state.exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_stops_all_and_the_same_command_resumes(
    tmp_path: Path, uninterrupted: dict[int, str], victim: int
) -> None:
    folder = prepared(tmp_path)
    settings = [*SETTINGS, "evaluation.interval=0", "checkpoint.interval=5"]
    ranks = ForkedRanks(2, settings, folder=folder)
    ranks.wait_until(lambda: last_step(folder / RUN) >= 8)
    ranks.processes[victim].send_signal(signal.SIGKILL)
    ended = ranks.wait(60)
    assert ended.codes[victim] == -signal.SIGKILL
    assert ended.codes[1 - victim] == 1, ended.everything
    assert "Traceback" not in ended.everything
    assert ended.err[1 - victim].count("Another rank ended and closed its connection") == 1
    resumed = train(folder, *SETTINGS, "evaluation.interval=0", "evaluation.sequences=8", ranks=2)
    assert "resume   step 5 " in resumed.out[0] or "resume   step 10 " in resumed.out[0]
    assert losses(folder / RUN) == uninterrupted


def test_a_budget_ends_all_sessions_and_a_time_limit_this_one(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    settings = [
        *SETTINGS,
        "run.steps=100000",
        "evaluation.interval=0",
        "cost.per_hour_usd=3600",  # a dollar a second
    ]
    first = train(folder, *settings, "cost.budget_usd=6", ranks=2, code=4)
    assert "stopped by cost.budget_usd" in first.out[0]
    step = last_step(folder / RUN)
    state = json.loads((folder / RUN / "state.json").read_text())
    assert (state["exit_code"], state["stopped_by"], state["step"]) == (4, "BUDGET", step)

    spent = train(folder, *settings, "cost.budget_usd=6", ranks=2, code=4)
    assert last_step(folder / RUN) == step  # earlier cost counts: nothing is loaded
    assert "Nothing was started: the run has cost $" in spent.err[0]
    assert json.loads((folder / RUN / "state.json").read_text()) == state

    late = train(folder, *settings, "run.time_limit_hours=1e-6", ranks=2, code=4)
    assert "stopped by run.time_limit_hours" in late.out[0]
    assert not (folder / RUN / "STOP").exists()
    used = RunTimeReader(folder / RUN).read()
    assert used.sessions == 2
    # Every second of each session is accounted for, at one dollar.
    assert used.seconds_trained == pytest.approx(used.spent.total_seconds, abs=0.1)
    assert used.cost_usd == pytest.approx(used.seconds_trained)
    last = json.loads((folder / RUN / "state.json").read_text())
    assert last["cost_usd"] == pytest.approx(used.cost_usd, abs=0.1)
    assert "goodput " in first.out[0]
