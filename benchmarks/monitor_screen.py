"""What the live screen costs: the share of a core of `launch/monitor.py` on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from measuring import ROOT, Record

from refocused.metrics.jsonl import JsonLines, write_state
from refocused.system.processes import this_process

HISTORY = 10_000  # logged steps behind it: 100,000 steps, each tenth logged
LOG_SECONDS = 10.0  # between two more; ten steps of 8 GPUs and a billion parameters take 14
SIZES = {"80x24": (80, 24), "200x50": (200, 50)}
START_SECONDS = 8.0  # imports, the history, the first picture


def screen_cost(run: Path, gpus: Callable[[], None], *, seconds: float) -> dict[str, Record]:
    """Return what the screen takes over a run that goes on, by its size.

    Args:
        run: The run's folder, which a sampler writes to.
        gpus: Changes what the GPUs say; called every second.
        seconds: Of watching each.
    """
    with _going_on(run, gpus):
        return {name: _watched(run, size, seconds=seconds) for name, size in SIZES.items()}


@contextlib.contextmanager
def _going_on(run: Path, gpus: Callable[[], None]) -> Iterator[None]:
    """Be a run that has trained for long and goes on."""
    metrics = JsonLines(run / "logs" / "training_metrics.jsonl")
    for logged in range(1, HISTORY + 1):
        metrics.write(_record(10 * logged))
        if logged % 100 == 0:
            loss = {"kind": "validation", "step": 10 * logged, "validation_loss": 3.0}
            metrics.write(loss)
    done = threading.Event()
    _write_status(run, 10 * HISTORY)

    def go_on() -> None:
        step, logged = 10 * HISTORY, time.monotonic()
        while not done.wait(1.0):
            gpus()
            if time.monotonic() - logged >= LOG_SECONDS:
                step, logged = step + 10, time.monotonic()
                metrics.write(_record(step))
                _write_status(run, step)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        metrics.close()


def _record(step: int) -> Record:
    return {
        "kind": "step",
        "step": step,
        "loss": 2.8 + 100 / step + random.random() / 50,
        "learning_rate": 3e-4,
        "gradient_norm": 0.4,
        "step_seconds": 1.44,
        "tokens_per_second": 728_000.0 + 1000 * random.random(),
        "mfu_fraction": 0.46,
        "data_wait_fraction": 0.003,
        "gpu_memory_fraction": 0.61,
        "seconds_left": 1.44 * (20 * HISTORY - step),
        "cost_left_usd": 200.0,
    }


def _write_status(run: Path, step: int) -> None:
    process = this_process()
    state = {
        "run": "watched",
        "status": "training",
        "pid": process.pid,
        "pid_started": process.started,
        "host": socket.gethostname(),
        "total_steps": 20 * HISTORY,
        "step": step,
        "tokens": step * 2**20,
        "loss": 2.8,
        "seconds": 1.44 * step,
        "cost_usd": 200.0,
        "tokens_per_second": 728_000.0,
    }
    write_state(run / "state.json", state)
    mirrored = {"bucket": "gs://bucket", "mirrored": [step - 1000], "waiting": [step]}
    write_state(run / "mirror.json", {**mirrored, "done_bytes": 1, "total_bytes": 3})


def _watched(run: Path, size: tuple[int, int], *, seconds: float) -> Record:
    """Open the screen in a terminal of a size, and measure it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(LC_ALL="C.UTF-8", TERM="xterm-256color")
        os.execv(sys.executable, [sys.executable, str(ROOT / "launch/monitor.py"), str(run)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    received = _Received(terminal)
    try:
        time.sleep(START_SECONDS)
        start, cpu, drawn = time.monotonic(), cpu_seconds(pid), received.count
        time.sleep(seconds)
        passed, used = time.monotonic() - start, cpu_seconds(pid) - cpu
        return {
            "core_percent": 100 * used / passed,
            "start_ms": 1000 * cpu,
            "memory_mib": resident_mib(pid),
            "bytes_a_second": (received.count - drawn) / passed,
        }
    finally:
        os.write(terminal, b"q")
        os.waitpid(pid, 0)
        received.thread.join()
        os.close(terminal)


class _Received:
    """Reads what a terminal is sent, as its window does."""

    def __init__(self, terminal: int) -> None:
        self.count = 0
        self._terminal = terminal
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # its process has ended
            while content := os.read(self._terminal, 65536):
                self.count += len(content)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process's living threads, to the nanosecond (proc's schedstat)."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def resident_mib(pid: int) -> float:
    """Return the memory that a process has."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
