"""Start the ranks of a run as processes, as a launcher does but faster."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "launch" / "train.py"


@dataclasses.dataclass(frozen=True)
class Ended:
    """Exit codes and output of ended ranks."""

    codes: list[int]
    out: list[str]
    err: list[str]

    @property
    def everything(self) -> str:
        return "\n".join([*self.out, *self.err])


def until(
    condition: Callable[[], object], *, seconds: float = 60, said: Callable[[], object] = str
) -> None:
    """Wait until a condition holds; fail after so many seconds with what `said` returns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.02)


class Ranks:
    """The running processes of one run."""

    def __init__(
        self,
        count: int,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._logs = folder / f"ranks-{time.monotonic_ns()}"
        self._logs.mkdir(parents=True)
        port = free_port()
        self.processes = [
            subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env={
                    **os.environ,
                    "PYTHONWARNINGS": "ignore",
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "LOCAL_WORLD_SIZE": str(count),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    **(environment or {}),
                },
                stdout=(self._logs / f"{rank}.out").open("wb"),
                stderr=(self._logs / f"{rank}.err").open("wb"),
            )
            for rank in range(count)
        ]

    def wait(self, timeout: float = 240) -> Ended:
        deadline = time.monotonic() + timeout
        try:
            codes = [p.wait(max(1.0, deadline - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()  # otherwise they would run during all later tests
            raise
        return Ended(codes, self._read("out"), self._read("err"))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        for process in self.processes:
            process.send_signal(number)

    def wait_until(self, condition: Callable[[], bool], timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline or all(p.poll() is not None for p in self.processes):
                self.kill()
                raise AssertionError("\n".join([*self._read("out"), *self._read("err")]))
            time.sleep(0.02)

    def printed(self, kind: str = "out") -> str:
        """Return rank 0's output so far on `out` or `err`."""
        return self._read(kind)[0]

    def _read(self, kind: str) -> list[str]:
        return [
            (self._logs / f"{rank}.{kind}").read_text(errors="replace")
            for rank in range(len(self.processes))
        ]


def write_tokens(folder: Path, *, shards: int, tokens: int, vocabulary: int, seed: int = 0) -> None:
    """Write uint16 .npy shards of a learnable sequence: each token is near its predecessor."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    for number in range(shards):
        noise = draw.integers(0, 4, tokens)
        ids = (np.cumsum(noise) * 7) % vocabulary
        np.save(folder / f"shard_{number:03d}.npy", ids.astype(np.uint16))


def metrics(run: Path, kind: str = "step") -> dict[int, dict[str, object]]:
    """Return a run's records by step; the last record of a step wins."""
    path = run / "logs" / "training_metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record for record in records if record["kind"] == kind}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def is_running(process: psutil.Process) -> bool:
    """Whether a process is running; a zombie is not."""
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def carrying(name: str, value: str) -> Iterator[psutil.Process]:
    """The running processes with a variable of this value."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(name) == value and is_running(process):
                yield process
