"""`speedrun` as a process, with a tiny model on one rank, and as a victim of kills."""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from kills import Victim, has_ended
from ranks import until

ROOT = str(Path(__file__).parents[2])
SHORT = [
    *("--vocabulary", "300", "--depth", "1", "run.steps=10", "run.device=cpu"),
    *("batch.global_batch_size=2", "model.sequence_length=64", "precision.dtype=fp32"),
    *("schedule.warmup_steps=2", "optimizer.momentum_warmup_steps=4", "checkpoint.interval=2"),
    *("evaluation.interval=5", "evaluation.sequences=4", "evaluation.sample_tokens=4"),
    "log.interval=1",
]
# Of a kill after the beginning of a stage, in seconds.
LATEST = {"text": 2.0, "tokenizer": 2.0, "shards": 4.0, "training": 20.0}


def started(folder: Path, given: Sequence[str] = SHORT) -> subprocess.Popen[bytes]:
    """Start the command; its output goes to `log`."""
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "refocused", "speedrun", *given],
            cwd=folder,
            # On two threads a run is not always exact (docs/decisions/devices.md).
            env={**os.environ, "RANKS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def finished(folder: Path, given: Sequence[str] = SHORT, *, code: int = 0) -> str:
    """Run the command to its end; return what it printed."""
    ended = started(folder, given).wait(600)
    text = (folder / "log").read_text(errors="replace")
    assert ended == code and "Traceback" not in text, text
    return text


def results(folder: Path) -> dict[str, bytes]:
    """Return the files of the stages before training, by name."""
    patterns = ("data/speedrun/*.json*", "data/speedrun/tokens-*/*.npy")
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    kept = [file for file in files if file.suffix in (".jsonl", ".json", ".npy")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in kept}


class Speedrun(Victim):
    """The command, killed in each of its stages; every other time its processes outlive it."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.stages = ["text", "tokenizer", "tokenizer", "shards", "shards", *["training"] * 5]
        self.report["stages"] = []

    def start(self) -> int:
        self.process = started(self.folder)
        return self.process.pid

    def await_moment(self, chance: random.Random) -> None:
        stage, log = self.stages[self.report["kills"]], self.folder / "log"
        while not (has_ended(self.process.pid) or f"\n== {stage}: " in log.read_text()):
            time.sleep(0.01)
        ends = time.monotonic() + chance.uniform(0, LATEST[stage])
        while time.monotonic() < ends and not has_ended(self.process.pid):
            time.sleep(0.01)
        self.left = psutil.Process(self.process.pid).children(recursive=True)
        begun = re.findall(r"^== (\w+): \S*refocused ", log.read_text(), re.M)
        self.report["stages"].append(begun[-1] if begun else "start")

    def ended(self, code: int) -> None:
        assert code == 0, (self.folder / "log").read_text()
        self.report["stages"].pop()
        shutil.rmtree(self.folder / "runs")  # it was faster than the kill

    def check(self) -> None:
        if self.report["kills"] % 2:
            for process in self.left:
                if process.is_running():
                    process.kill()
        until(lambda: all(has_ended(process.pid) for process in self.left), seconds=120)

    def finish(self) -> None:
        finished(self.folder)
