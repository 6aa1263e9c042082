"""Hangs on real ranks: each is explained and ended, with the last checkpoint good."""

import contextlib
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hang_faults import FAULT, RANK, STEP, DeadDisk
from hang_faults import train as train_until_the_fault
from ranks import Ended, ForkedRanks, metrics, train, until
from tiny import log_lines, tiny_run

from refocused.metrics.jsonl import read_json
from refocused.metrics.run_time import RunTimeReader
from refocused.monitor.sampler.watchdog import in_kernel
from refocused.system.errors import ExitCode

SETTINGS = [
    *("--config", "tiny.yaml", "run.steps=100000", "run.hang_minutes=0.1"),
    *("checkpoint.mirror=null", "checkpoint.interval=5", "evaluation.interval=0"),
    *("log.sample_seconds=1", "run.device=cpu"),
]
MISSING = r"Rank NUMBER on .* is missing: it is "
NAMED = {
    "stopped": MISSING + r"stopped \(state T: by SIGSTOP or a debugger\), at ",
    "interpreter": MISSING
    + r"holding Python's interpreter lock \(GIL\) for .* s, at re/__init__.py"
    r":\d+ in match, called by .*loop.py",
    "disk": MISSING + r"waiting for a disk, in request_wait_answer of the kernel, "
    r"at pathlib.py:\d+ in stat, called by .*loop.py",
    "collective": r"wait in different collectives: .*rank NUMBER is waiting in gloo:all_reduce "
    r"number 1 of group \d+, sizes \[\[3\]\]",
}


def hang(folder: Path, fault: str, *, rank: int, step: int = 8) -> tuple[Ended, float]:
    """Train with a fault; return how it ended, and the seconds from the last step to the report."""
    tiny_run(folder)
    environment = {FAULT: fault, RANK: str(rank), STEP: str(step)}
    with contextlib.ExitStack() as stack:
        if fault == "disk":
            stack.callback(DeadDisk(folder / "dead").end)
        ranks = ForkedRanks(
            2, SETTINGS, folder=folder, environment=environment, command=train_until_the_fault
        )
        stack.callback(ranks.kill)
        other, run = ranks.processes[1 - rank], folder / "runs/tiny"
        until(lambda: step - 1 in metrics(run) or other.poll() is not None, seconds=240)
        began = time.monotonic()
        until(lambda: other.poll() is not None, seconds=240)
        return ranks.wait(30), time.monotonic() - began


@pytest.mark.slow
def test_a_hang_is_explained_and_ended_and_its_time_is_accounted_for(tmp_path: Path) -> None:
    ended, seconds = hang(tmp_path, "stopped", rank=1)
    check(tmp_path, ended, "stopped", rank=1)
    resumed = train(tmp_path, *SETTINGS, "run.steps=10", "--resume", "latest", ranks=2)
    assert "resume   step 5 (" in resumed.out[0], resumed.everything
    used = RunTimeReader(tmp_path / "runs/tiny").read()
    assert 6 <= used.hang_seconds <= seconds and used.sessions == 2
    assert sum(used.shares().values()) == pytest.approx(1.0, abs=0.001)
    (told,) = re.findall("goodput .*", resumed.out[0])
    print(told)
    assert "| hang " in told


@pytest.mark.slow
def test_a_hang_before_the_first_step_is_explained(tmp_path: Path) -> None:
    ended, _ = hang(tmp_path, "interpreter", rank=1, step=0)
    assert ended.codes == [ExitCode.HUNG, -signal.SIGKILL], ended.everything
    missing = MISSING.replace("NUMBER", "1") + r"holding Python's interpreter lock .* in match"
    assert re.search(missing + r".*\(step 0, start-up\)", ended.err[0]), ended.everything


def test_a_thread_that_waits_for_a_disk_is_found(tmp_path: Path) -> None:
    code = "from pathlib import Path; from threading import Thread; import time; "
    code += "Thread(target=Path('dead/file').stat).start(); time.sleep(600)"
    with contextlib.ExitStack() as stack:
        stack.callback(DeadDisk(tmp_path / "dead").end)
        process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
        stack.callback(process.kill)
        until(lambda: in_kernel(process.pid, all_threads=True)[1] == "request_wait_answer")
        assert in_kernel(process.pid)[1] != "request_wait_answer"


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", NAMED)
def test_twenty_hangs_are_named(tmp_path: Path, fault: str, chance: random.Random) -> None:
    """Four hangs of each kind; four of the network: `test_many_hosts.py`."""
    for number in range(4):
        folder, rank = tmp_path / str(number), number % 2
        folder.mkdir()
        ended, seconds = hang(folder, fault, rank=rank, step=chance.randrange(7, 30))
        print(f"{fault}, rank {rank}: reported and ended {seconds:.1f} s after the last step")
        check(folder, ended, fault, rank=rank)


def check(folder: Path, ended: Ended, fault: str, *, rank: int) -> None:
    told = "\n".join(ended.err)  # any rank that can prints it
    assert ended.codes[1 - rank] == ExitCode.HUNG, ended.everything
    assert re.search(NAMED[fault].replace("NUMBER", str(rank)), told), told
    (report,) = (folder / "runs/tiny/logs").glob("hang-*.txt")
    assert str(report) in told
    assert fault != "interpreter" or ended.codes[rank] == -signal.SIGKILL
    assert report.read_text().count("(most recent call first)") >= 4
    events = [one for one in log_lines(folder / "runs/tiny", "events") if one["kind"] == "alarm"]
    assert "hang" in [one["alarm"] for one in events]
    state = folder / "runs/tiny/state.json"  # the watchdog writes it last
    until(lambda: (read_json(state) or {}).get("exit_code") == ExitCode.HUNG)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_steps_raise_no_alarm(tmp_path: Path) -> None:
    """The real watchdog, with steps of a few ms, validations, saves and batches that come late."""
    tiny_run(tmp_path)
    settings = ["run.steps=10000", "evaluation.interval=100", "checkpoint.interval=250"]
    environment = {FAULT: "late", RANK: "1", STEP: "500"}
    settings += [
        "log.interval=50",
        "model.sequence_length=16",
        "batch.gradient_accumulation_steps=1",
    ]
    how: Any = {"environment": environment, "command": train_until_the_fault, "timeout": 3000}
    train(tmp_path, *SETTINGS, *settings, ranks=2, **how)
    assert not list((tmp_path / "runs/tiny/logs").glob("hang-*"))
