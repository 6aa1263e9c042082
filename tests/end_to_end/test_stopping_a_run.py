"""Stopping: however it is asked, the state is saved where the run stood and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import ForkedRanks, train
from ranks import ROOT, TRAIN, Ended, free_port, metrics, write_tokens
from tiny import tiny_run

from refocused.monitoring.performance import read_run_time

pytestmark = pytest.mark.slow
STEPS = 40
SETTINGS = [
    "--config",
    "tiny.yaml",
    f"run.steps={STEPS}",
    "checkpoint.mirror=null",
    "checkpoint.interval=0",  # saved because it stops, not because it was due
    # A validation of a few seconds, so that a signal can come in the middle of it; not due in
    # most tests.
    "data.validation_fraction=0.5",
    "evaluation.windows=1500",
]
RUN = Path("runs") / "tiny"


def losses(run: Path) -> list[str]:
    return [float(record["loss"]).hex() for _, record in sorted(metrics(run).items())]


def last_step(run: Path) -> int:
    return max(metrics(run), default=0)


def prepared(folder: Path) -> Path:
    tiny_run(folder)
    write_tokens(folder / "tokens", shards=3, tokens=40_000, vocabulary=512)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = prepared(tmp_path_factory.mktemp("uninterrupted"))
    ended = train(folder, *SETTINGS, "evaluation.interval=0", "evaluation.windows=8", ranks=2)
    assert ended.codes == [0, 0], ended.everything
    return losses(folder / RUN)


def check_stopped_and_resumable(folder: Path, ended: Ended, wanted: list[str]) -> int:
    """Check what a stop left, resume to the end, and return the step where it stopped."""
    assert ended.codes == [130, 130], ended.everything
    assert "Traceback" not in ended.everything
    run = folder / RUN
    stopped_at = last_step(run)
    assert stopped_at < STEPS
    checkpoints = run / "checkpoints"
    assert (checkpoints / f"checkpoint_step_{stopped_at}" / "manifest.json").exists()
    assert not list(checkpoints.glob(".*"))
    assert json.loads((run / "state.json").read_text())["status"] == "stopped"
    resumed = train(folder, *SETTINGS, "evaluation.interval=0", "evaluation.windows=8", ranks=2)
    assert resumed.codes == [0, 0], resumed.everything
    assert f"resume   step {stopped_at} " in resumed.out[0]
    assert losses(run) == wanted
    return stopped_at


def signal_both(ranks: ForkedRanks, number: signal.Signals) -> None:
    ranks.kill(number)


def signal_one(ranks: ForkedRanks, number: signal.Signals) -> None:
    ranks.processes[1].send_signal(number)


def signal_until_the_end(ranks: ForkedRanks, number: signal.Signals) -> None:
    """Again and again: in the step, in the save, after it."""
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
def test_a_signal_saves_where_the_run_stands(
    tmp_path: Path,
    uninterrupted: list[str],
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
    """Stop the ranks' processes where a step is half written."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if list(checkpoints.glob(".tmp-*")):
            ranks.kill(signal.SIGSTOP)
            time.sleep(0.05)  # until all threads stand still
            if list(checkpoints.glob(".tmp-*/zero")):
                return
            ranks.kill(signal.SIGCONT)
        time.sleep(0.001)
    raise AssertionError(ranks.printed())


@pytest.mark.parametrize("in_background", ["false", "true"])
def test_a_signal_inside_a_save_lets_it_end(
    tmp_path: Path, uninterrupted: list[str], in_background: str
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
    assert (checkpoints / name / "manifest.json").exists()  # what was being saved is saved
    check_stopped_and_resumable(folder, ended, uninterrupted)


def test_a_signal_cuts_validation_short(tmp_path: Path, uninterrupted: list[str]) -> None:
    folder = prepared(tmp_path)
    ranks = ForkedRanks(2, [*SETTINGS, "evaluation.interval=8"], folder=folder)
    ranks.wait_until(lambda: last_step(folder / RUN) == 8)
    ranks.kill(signal.SIGTERM)
    ended = ranks.wait(30)
    assert not metrics(folder / RUN, "validation")
    assert check_stopped_and_resumable(folder, ended, uninterrupted) == 8


def test_stop_py_saves_and_waits(tmp_path: Path, uninterrupted: list[str]) -> None:
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


def test_a_signal_before_the_first_step_ends_without_a_checkpoint(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    ranks = ForkedRanks(2, SETTINGS, folder=folder)
    ranks.wait_until(lambda: "ZeRO-3" in ranks.printed())  # its handlers are there by then
    ranks.kill(signal.SIGTERM)
    ended = ranks.wait(30)
    assert ended.codes == [130, 130], ended.everything
    assert ended.err[0].count("Stopped by a signal before training began") == 1
    assert "Traceback" not in ended.everything and "step 0" not in ended.everything
    assert not (folder / RUN / "checkpoints").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_end_when_a_rank_is_killed_and_the_same_command_resumes(
    tmp_path: Path, uninterrupted: list[str], victim: int
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
    assert ended.err[1 - victim].count("Another rank has ended") == 1
    resumed = train(folder, *SETTINGS, "evaluation.interval=0", "evaluation.windows=8", ranks=2)
    assert resumed.codes == [0, 0], resumed.everything
    assert "resume   step 5 " in resumed.out[0] or "resume   step 10 " in resumed.out[0]
    assert losses(folder / RUN) == uninterrupted


@contextlib.contextmanager
def launched(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The real launcher over two ranks, in a session of its own that is killed at the end."""
    deepspeed = Path(sys.executable).with_name("deepspeed")
    with (folder / "launcher.out").open("wb") as out:
        process = subprocess.Popen(
            [deepspeed, "--num_gpus", "2", "--master_port", str(free_port()), TRAIN, *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def running(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_for(condition: Callable[[], bool], log: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.05)


def test_ranks_notice_that_the_deepspeed_command_was_terminated(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    log = folder / "launcher.out"
    state = folder / RUN / "state.json"
    settings = [*SETTINGS, "run.steps=100000", "run.device=cpu", "evaluation.interval=0"]
    with launched(folder, *settings) as process:
        wait_for(lambda: last_step(folder / RUN) >= 7 or process.poll() is not None, log, 120)
        assert process.poll() is None, log.read_text()
        rank_0 = json.loads(state.read_text())["pid"]
        launcher = parent_of(rank_0)
        process.terminate()
        process.wait(10)
        wait_for(lambda: not running(rank_0) and not running(launcher), log, 60)
    said = log.read_text()
    assert "stopped by the launcher is gone" in said
    assert "Traceback" not in said and "FutureWarning" not in said
    stopped_at = last_step(folder / RUN)
    saved = folder / RUN / "checkpoints" / f"checkpoint_step_{stopped_at}" / "manifest.json"
    assert saved.exists(), said
    assert json.loads(state.read_text())["status"] == "stopped"


def test_a_budget_ends_all_sessions_and_a_time_limit_this_one(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    settings = [
        *SETTINGS,
        "run.steps=100000",
        "evaluation.interval=0",
        "cost.per_hour_usd=3600",  # a dollar a second
    ]
    first = train(folder, *settings, "cost.budget_usd=6", ranks=2)
    assert first.codes == [4, 4], first.everything
    assert "stopped by cost.budget_usd" in first.out[0]
    step = last_step(folder / RUN)
    state = json.loads((folder / RUN / "state.json").read_text())
    assert (state["exit_code"], state["stopped_by"], state["step"]) == (4, "BUDGET", step)

    spent = train(folder, *settings, "cost.budget_usd=6", ranks=2)
    assert spent.codes == [4, 4], spent.everything
    assert last_step(folder / RUN) == step  # what was spent before counts: not one more step
    assert "resume: raise cost.budget_usd, then" in spent.out[0]

    late = train(folder, *settings, "run.time_limit_hours=1e-6", ranks=2)
    assert late.codes == [4, 4], late.everything
    assert "stopped by run.time_limit_hours" in late.out[0]
    assert not (folder / RUN / "STOP").exists()
    used = read_run_time(folder / RUN)
    assert used.sessions == 3
    # Every second from each session's begin has its use, and a dollar each.
    assert used.seconds_trained == pytest.approx(used.spent.total_seconds, abs=0.1)
    assert used.cost_usd == pytest.approx(used.seconds_trained)
    last = json.loads((folder / RUN / "state.json").read_text())
    assert last["cost_usd"] == pytest.approx(used.cost_usd, abs=0.1)
    assert "goodput " in first.out[0]


def test_a_stop_at_the_last_step_leaves_its_validation_to_the_next_session(
    tmp_path: Path,
) -> None:
    folder = prepared(tmp_path)
    settings = [*SETTINGS, "run.steps=8", "evaluation.interval=0"]
    ranks = ForkedRanks(2, settings, folder=folder)
    ranks.wait_until(lambda: last_step(folder / RUN) == 8)
    ranks.kill(signal.SIGTERM)
    ended = ranks.wait(30)
    assert ended.codes == [130, 130], ended.everything
    assert not metrics(folder / RUN, "validation")
    saved = folder / RUN / "checkpoints" / "checkpoint_step_8" / "manifest.json"
    assert saved.exists()
    ended = train(folder, *settings, "evaluation.windows=8", ranks=2)
    assert ended.codes == [0, 0], ended.everything
    assert list(metrics(folder / RUN, "validation")) == [8]
    assert "best validation loss" in ended.out[0]


def test_under_the_supervisor_a_crash_starts_again_and_ctrl_c_saves(tmp_path: Path) -> None:
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
    mark = f"TMPDIR={folder}".encode()
    try:
        wait_for(lambda: last_step(folder / RUN) >= 7 or process.poll() is not None, log, 180)
        rank_0 = json.loads(state.read_text())["pid"]
        os.kill(rank_0, signal.SIGKILL)
        wait_for(
            lambda: json.loads(state.read_text())["pid"] != rank_0 or process.poll() is not None,
            log,
            180,
        )
        begun = last_step(folder / RUN)
        wait_for(lambda: last_step(folder / RUN) > begun or process.poll() is not None, log, 60)
        assert process.poll() is None, log.read_text()
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    finally:
        for pid in carrying(mark):
            os.kill(pid, signal.SIGKILL)
    said = log.read_text()
    assert code == 130, said
    assert "Rank 0 was killed" in said and "Starting again after step" in said
    assert "stopping after this step and saving; 300 s" in said
    assert "Traceback" not in said and "exits with return code" not in said
    assert "resume: RANKS=2 launch/train.sh --restarts 1 --config tiny.yaml" in said
    assert list(carrying(mark)) == []
    stopped_at = last_step(folder / RUN)
    checkpoint = folder / RUN / "checkpoints" / f"checkpoint_step_{stopped_at}"
    assert (checkpoint / "manifest.json").exists(), said


def carrying(mark: bytes) -> Iterator[int]:
    """The processes whose environment holds an entry."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0") and running(int(path.parent.name)):
                yield int(path.parent.name)
