import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from data.text_samples import assert_prepared, files_of, random_texts, write_jsonl
from kills import Victim, has_ended
from ranks import until

from refocused.prepare.texts.tokenize_worker import SPLITS
from refocused.prepare.write_shards import packed_sources

KILLS = int(os.environ.get("REFOCUSED_KILLS", "20"))
SCRIPT = Path(__file__).with_name("tokenize_process.py")


class Job:
    """A command that is killed at random moments and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "tasks.log"
        self.out = folder / "out"
        self.log.touch()

    def start(
        self, out: Path, *more: str, seconds: float, **variables: str
    ) -> subprocess.Popen[str]:
        command = ["tokenize", self.folder / "in.jsonl", "--out", out, "--tokenizer", "bytes"]
        options = ["--workers", "2", "--shard-tokens", "5000", "--val-ratio", "0.1"]
        environment = {
            "TASK_BYTES": "2000",
            "TASK_LOG": str(self.log),
            "TASK_SECONDS": str(seconds),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **variables,
        }
        return subprocess.Popen(
            [sys.executable, SCRIPT, *command, *options, *more],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def step(self, number: int, *, seconds: float = 0.0, **variables: str) -> subprocess.Popen[str]:
        """Start a process of a SLURM step."""
        variables = {"SLURM_PROCID": str(number), "LOST_SECONDS": "2", **variables}
        return self.start(self.out, "--executor", "slurm", seconds=seconds, **variables)

    def begun(self, *, at_least: int = 0) -> list[int]:
        """Wait until so many tasks have begun, and return them."""
        while len(begun := self.log.read_text().split()) < at_least:
            time.sleep(0.01)
        return [int(line) for line in begun]

    def finished_tasks(self) -> int:
        """Return how many tasks are packed in both splits: these must not be done again."""
        return packed_sources(self.out / ".prepare", SPLITS)

    def shards(self) -> dict[str, tuple[int, int]]:
        found = {path: path.stat() for path in self.out.glob("*.npy")}
        return {path.name: (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


class Tokenizing(Victim):
    """The command on a folder, begun anew once it is finished."""

    longest_s = 0.5

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.done, self.kept = job, 0, job.shards()

    def start(self) -> int:
        self.job.log.write_text("")
        self.running = self.job.start(self.job.out, seconds=0.05)
        return self.running.pid

    def await_moment(self, chance: random.Random) -> None:
        kill_in_start = chance.random() < 0.25
        while not (kill_in_start or self.job.log.read_text() or has_ended(self.running.pid)):
            time.sleep(0.01)
        super().await_moment(chance)

    def ended(self, code: int) -> None:
        assert self.running.stdout is not None
        assert code == 0, self.running.stdout.read()
        shutil.rmtree(self.job.out)
        self.done, self.kept = 0, {}

    def check(self) -> None:
        begun, now = self.job.begun(), self.job.shards()
        assert all(task >= self.done for task in begun), (self.report, self.done, begun)
        assert {name: now[name] for name in self.kept} == self.kept
        self.done, self.kept = self.job.finished_tasks(), now


@pytest.mark.slow
def test_kills_lose_no_shard_and_repeat_no_finished_task(tmp_path, chance):
    job = Job(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", random_texts(400 * KILLS, seed=5))
    assert job.start(tmp_path / "whole", seconds=0.0).wait(120) == 0
    Tokenizing(job).run(kills=KILLS, chance=chance)
    last = job.start(job.out, seconds=0.0)
    output = last.communicate(timeout=120)[0]
    assert last.returncode == 0, output
    assert_prepared(job.out)
    assert files_of(job.out) == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_the_processes_of_a_killed_command_end(tmp_path):
    job = Job(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", random_texts(2000))
    running = job.start(job.out, seconds=0.2)
    job.begun(at_least=1)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(children) >= 2
    running.kill()
    running.wait(60)
    until(lambda: all(has_ended(int(child)) for child in children))


@pytest.mark.slow
def test_a_lost_process_of_a_step_costs_one_task(tmp_path):
    job, log = Job(tmp_path), tmp_path / "lost.log"
    texts = write_jsonl(tmp_path / "in.jsonl", random_texts(250))
    lost = job.step(1, seconds=60, TASK_LOG=str(log))
    packing = job.step(0, seconds=0.5)
    while not log.exists():
        time.sleep(0.01)
    lost.kill()
    for process in [packing, job.step(2, seconds=0.1), lost]:
        assert process.wait(60) == (-9 if process is lost else 0), process.communicate()[0]
    assert job.start(tmp_path / "whole", seconds=0.0).wait(60) == 0
    assert files_of(job.out) == files_of(tmp_path / "whole")
    begun = sorted(job.begun())
    assert begun[0::2] == begun[1::2] == list(range(len(begun) // 2))  # also those of `whole`
    late = job.step(1)  # the data set is finished
    assert (late.wait(60), late.communicate()[0]) == (0, "")
    shutil.rmtree(job.out)
    texts.write_text(texts.read_text() + "{}\n")
    steps = [job.step(0), job.step(1)]
    assert "it has no text under 'text'" in steps[0].communicate(timeout=60)[0]
    assert [step.wait(60) for step in steps] == [1, 0]


@pytest.mark.parametrize("executor", [pytest.param("ray", marks=pytest.mark.long), "slurm"])
@pytest.mark.slow
def test_a_killed_command_on_many_hosts_continues(tmp_path, executor):
    if executor == "ray":
        pytest.importorskip("ray")
    job, options = Job(tmp_path), ("--executor", executor)
    write_jsonl(tmp_path / "in.jsonl", random_texts(250))
    steps = [{"SLURM_PROCID": str(number)} for number in range(1 + (executor == "slurm"))]
    running = [job.start(job.out, *options, seconds=0.3, **step) for step in steps]
    finished = job.begun(at_least=6)[:3]
    for process in running:
        process.kill()
    again = [job.start(job.out, *options, seconds=0, SLURM_JOB_ID="2", **one) for one in steps]
    assert [process.wait(100) for process in again] == [0] * len(again)
    assert not [task for task in finished if job.begun().count(task) > 1]
    assert job.start(tmp_path / "whole", seconds=0.0).wait(60) == 0
    assert files_of(job.out) == files_of(tmp_path / "whole")
