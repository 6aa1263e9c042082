"""Kill a process at random moments, again and again, and check what each kill leaves.

    .venv/bin/python tests/kills.py checkpoints.test_checkpoint_kills:Saves FOLDER --kills 100

A subclass of `Victim` says what is killed and what must hold after it. The program imports all it
needs before it forks a victim, so that a life takes milliseconds; without other threads, which
pytest may have, a fork is safe.
"""

import argparse
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))


class Victim:
    """Work that is killed. `report` is the result; each subclass says what it must hold."""

    longest_s = 0.15  # of a life

    def __init__(self) -> None:
        self.report: dict[str, Any] = {"kills": 0, "interrupted": 0}
        self.told: list[int] = []  # numbers that the last life has told with `tell`
        self._pipe = (-1, -1)

    def work(self) -> None:
        """Work until killed, in a process of its own."""
        raise NotImplementedError

    def tell(self, number: int) -> None:
        """Tell the parent of progress; what was told before the kill counts."""
        os.write(self._pipe[1], f"{number}\n".encode())

    def start(self) -> int:
        """Start a process; return its id."""
        if child := os.fork():
            return child
        self.work()
        os._exit(0)

    def await_moment(self, chance: random.Random) -> None:
        """Wait until the kill."""
        time.sleep(chance.uniform(0.0, self.longest_s))

    def ended(self, code: int) -> None:
        """Go on after a process that ended by itself; it does not count as a kill."""
        raise AssertionError(f"the process exited with {code}")

    def check(self) -> None:
        """Check what a kill left."""

    def finish(self) -> None:
        """Let the work be finished, and check the whole."""

    def is_done(self, kills: int) -> bool:
        """Whether there were enough kills."""
        return bool(self.report["kills"] >= kills)

    def run(self, *, kills: int, chance: random.Random) -> dict[str, Any]:
        """Kill until `is_done`; return the report."""
        while not self.is_done(kills):
            self._pipe = os.pipe()
            process = self.start()
            self.await_moment(chance)
            os.kill(process, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            os.close(self._pipe[1])
            with os.fdopen(self._pipe[0]) as pipe:
                self.told = [int(line) for line in pipe.read().split()]
            if code != -signal.SIGKILL:
                self.ended(code)
                continue
            self.report["kills"] += 1
            self.check()
        self.finish()
        return self.report


def has_ended(process: int) -> bool:
    """Whether a process is gone, or waits only for its parent to learn of it."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def report_of(victim: str, *arguments: object, kills: int, seed: int = 0) -> dict[str, Any]:
    """Run this program; return the report of `victim`, as `MODULE:CLASS`."""
    options = [*map(str, arguments), "--kills", str(kills), "--seed", str(seed)]
    done = subprocess.run(
        [sys.executable, __file__, victim, *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("victim", help="MODULE:CLASS below tests/")
    parser.add_argument("arguments", nargs="*", help="of the class")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    module, _, name = chosen.victim.partition(":")
    kind = getattr(importlib.import_module(module), name)
    chance = random.Random(chosen.seed)
    print(json.dumps(kind(*chosen.arguments).run(kills=chosen.kills, chance=chance)))
