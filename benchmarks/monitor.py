"""Measure the cost of monitoring a run: the sampler and the live screen.

    .venv/bin/python benchmarks/monitor.py [--seconds 20]

The sampler watches eight GPUs of a stand-in for NVIDIA's library (tests/monitor), once a second,
beside a run whose files change ten times a second. Its figures hold the stand-in's own time, and
not that of a driver. The screen shows a run with 10,000 logged steps behind it, one more every ten
seconds, and GPUs that change every second. CPU time is that of the measured process: on a busy
machine wall time says little. What a run with everything on costs: step_whole.py.
"""

import contextlib
import dataclasses
import fcntl
import os
import pty
import random
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from measuring import ROOT, Column, Record, parser_of, say, table, write_report

from refocused.metrics.jsonl import JsonLines, write_state
from refocused.monitor.sampler.start_sampler import SamplerSettings, start_sampler
from refocused.system.processes import identify, this_process

sys.path.insert(0, str(ROOT / "tests" / "monitor"))

GPUS = 8
WARM_SECONDS = 5.0  # of the sampler, for its imports and first readings
MOST_SAMPLER_PERCENT, MOST_SCREEN_PERCENT = 0.5, 1.0
COLUMNS = (
    Column("core_percent", "% of a core", "{:.3f}"),
    Column("start_ms", "CPU ms to start", "{:,.0f}"),
    Column("memory_mib", "memory, MiB", "{:,.0f}"),
    Column("bytes_a_second", "bytes a second", "{:,.0f}"),
)
HISTORY = 10_000  # logged steps so far: 100,000 steps, every tenth logged
LOG_SECONDS = 10  # between two more; ten steps of 8 GPUs and a billion parameters take 14
SIZES = {"80x24": (80, 24), "200x50": (200, 50)}
START_SECONDS = 8.0  # imports, the history, the first picture


@dataclasses.dataclass(frozen=True)
class Site:
    """A run that is watched."""

    run: Path  # its folder
    sampler_pid: int  # of the process that samples
    stir: Callable[[], None]  # changes the GPUs' readings


def main() -> None:
    """Measure, print the tables, write the JSON; fail if a cost exceeds its limit."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the sampler, each screen")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, watched_site(Path(folder)) as site:
        say(f"the sampler, {chosen.seconds:.0f} s")
        sampler = sampler_cost(site.run, site.sampler_pid, seconds=chosen.seconds)
        say(f"the screen, {chosen.seconds:.0f} s at each size")
        screens = screen_cost(site.run, site.stir, seconds=chosen.seconds)
    costs = {"sampler": sampler, **screens}
    title = f"The sampler at 1 Hz over {GPUS} GPUs; the screen as often as it looks by itself"
    print(table(costs, COLUMNS, title=title))
    write_report(chosen, costs)
    limits = {"sampler": MOST_SAMPLER_PERCENT} | dict.fromkeys(screens, MOST_SCREEN_PERCENT)
    costly = [name for name, most in limits.items() if costs[name]["core_percent"] > most]
    for name in costly:
        print(f"TOO MUCH: {name} takes more than {limits[name]} % of a core.")
    sys.exit(bool(costly))


@contextlib.contextmanager
def watched_site(folder: Path) -> Iterator[Site]:
    """Start a sampler over the stand-in's GPUs."""
    from nvml_machine import Machine

    machine = Machine(folder / "nvml", gpus=GPUS)
    os.environ.update(machine.environment)
    run = folder / "run"

    def stir() -> None:
        for index in range(GPUS):
            machine.gpu(
                index,
                utilization=random.randint(90, 100),
                temperature=random.randint(58, 72),
                power=random.randint(600_000, 700_000),
            )

    with subprocess.Popen(["sleep", "86400"]) as rank:  # the sampler ends with it
        identity = identify(rank.pid)
        assert identity is not None
        settings = SamplerSettings(run=run, training=identity, interval_seconds=1.0, ranks=GPUS)
        try:
            yield Site(run, start_sampler(settings), stir)
        finally:
            rank.kill()


def cost_of(pid: int, written: Callable[[], int], *, warm: float, seconds: float) -> Record:
    """Return the cost of a process over some seconds, after those in which it starts.

    `written` returns the bytes that it has written so far.
    """
    time.sleep(warm)
    began, cpu, size = time.monotonic(), cpu_seconds(pid), written()
    time.sleep(seconds)
    passed, used = time.monotonic() - began, cpu_seconds(pid) - cpu
    return {
        "core_percent": 100 * used / passed,
        "start_ms": 1000 * cpu,
        "memory_mib": psutil.Process(pid).memory_info().rss / 2**20,
        "bytes_a_second": (written() - size) / passed,
    }


@contextlib.contextmanager
def again_and_again(act: Callable[[int], None], *, seconds: float) -> Iterator[None]:
    """Act in a thread with so many seconds between, counting from 1."""
    done = threading.Event()

    def repeat() -> None:
        number = 0
        while not done.wait(seconds):
            act(number := number + 1)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def sampler_cost(run: Path, pid: int, *, seconds: float) -> Record:
    """Return the sampler's cost while the run's files change ten times a second."""
    samples = run / "logs" / "gpu_metrics.jsonl"
    metrics = JsonLines(run / "logs" / "training_metrics.jsonl")

    def write(step: int) -> None:  # a logged step, a state and a mirror's status
        metrics.write({"kind": "step", "step": step, "loss": 3.0, "cost_left_usd": 1.0})
        write_state(run / "state.json", {"status": "training", "step": step, "cost_usd": 1.0})
        status = {"waiting": [step], "last_error": None, "heartbeat": time.time()}
        write_state(run / "mirror.json", status)

    with again_and_again(write, seconds=0.1):
        return cost_of(pid, lambda: samples.stat().st_size, warm=WARM_SECONDS, seconds=seconds)


def screen_cost(run: Path, gpus: Callable[[], None], *, seconds: float) -> dict[str, Record]:
    """Return the screen's cost for a running run, by its size.

    `gpus` changes what the GPUs say, and is called every second.
    """
    metrics = JsonLines(run / "logs" / "training_metrics.jsonl")
    for logged in range(1, HISTORY + 1):
        metrics.write(_record(10 * logged))
        if logged % 100 == 0:
            loss = {"kind": "validation", "step": 10 * logged, "validation_loss": 3.0}
            metrics.write(loss)
    _write_status(run, 10 * HISTORY)

    def go_on(second: int) -> None:
        gpus()
        if second % LOG_SECONDS == 0:
            step = 10 * HISTORY + second
            metrics.write(_record(step))
            _write_status(run, step)

    with again_and_again(go_on, seconds=1.0):
        return {name: _watched(run, size, seconds=seconds) for name, size in SIZES.items()}


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
    received = [0]

    def read() -> None:
        with contextlib.suppress(OSError):  # its process has ended
            while content := os.read(terminal, 65536):
                received[0] += len(content)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        return cost_of(pid, lambda: received[0], warm=START_SECONDS, seconds=seconds)
    finally:
        os.write(terminal, b"q")
        os.waitpid(pid, 0)
        reader.join()
        os.close(terminal)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process's living threads, to the nanosecond (proc's schedstat)."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


if __name__ == "__main__":
    main()
