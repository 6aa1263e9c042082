import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data.text_samples import assert_prepared, files_of, random_texts, write_jsonl

from refocused.prepare.packing_state import Journal
from refocused.prepare.texts.tokenize_worker import SPLITS

KILLS = int(os.environ.get("REFOCUSED_KILLS", "20"))
SCRIPT = Path(__file__).with_name("tokenize_process.py")


class Job:
    """A command that is killed at random moments and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "tasks.log"
        self.out = folder / "out"

    def start(self, out: Path, *, seconds: float) -> subprocess.Popen[str]:
        command = ["tokenize", self.folder / "in.jsonl", "--out", out, "--tokenizer", "bytes"]
        options = ["--workers", "2", "--shard-tokens", "5000", "--val-ratio", "0.1"]
        environment = {
            "TASK_BYTES": "2000",
            "TASK_LOG": str(self.log),
            "TASK_SECONDS": str(seconds),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        return subprocess.Popen(
            [sys.executable, SCRIPT, *command, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finished_tasks(self) -> int:
        """Return how many tasks are packed in both splits: these must not be done again."""
        path = self.out / ".prepare" / "journal.jsonl"
        if not path.exists():
            return 0
        copy = self.folder / "journal.copy"
        copy.write_bytes(path.read_bytes())
        journal = Journal(copy, dtype=np.dtype("<u2"))
        with contextlib.closing(journal):
            return min(journal.cursor(split).source for split in SPLITS)

    def shards(self) -> dict[str, tuple[int, int]]:
        found = {path: path.stat() for path in self.out.glob("*.npy")}
        return {path.name: (stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


@pytest.mark.slow
def test_kills_lose_no_shard_and_repeat_no_finished_task(
    tmp_path: Path, chance: random.Random
) -> None:
    job = Job(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", random_texts(400 * KILLS, seed=5))
    assert job.start(tmp_path / "whole", seconds=0.0).wait(120) == 0
    done, kept, kills = 0, job.shards(), 0
    while kills < KILLS:
        job.log.write_text("")
        running = job.start(job.out, seconds=0.05)
        kill_in_start = chance.random() < 0.25
        while not (kill_in_start or job.log.read_text()) and running.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.5))
        if running.poll() is not None:  # it was finished: begin anew
            assert running.returncode == 0, running.communicate()[0]
            shutil.rmtree(job.out)
            done, kept = 0, {}
            continue
        running.kill()
        running.wait(60)
        kills += 1
        begun = [int(line) for line in job.log.read_text().split()]
        assert all(task >= done for task in begun), (kills, done, begun)
        now = job.shards()
        assert {name: now[name] for name in kept} == kept
        done, kept = job.finished_tasks(), now
    last = job.start(job.out, seconds=0.0)
    output = last.communicate(timeout=120)[0]
    assert last.returncode == 0, output
    assert_prepared(job.out)
    assert files_of(job.out) == files_of(tmp_path / "whole")


@pytest.mark.slow
def test_the_processes_of_a_killed_command_end(tmp_path: Path) -> None:
    job = Job(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", random_texts(2000))
    job.log.write_text("")
    running = job.start(job.out, seconds=0.2)
    while not job.log.read_text():
        time.sleep(0.01)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(children) >= 2
    running.kill()
    running.wait(60)
    deadline = time.monotonic() + 60
    while any(_alive(int(child)) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
