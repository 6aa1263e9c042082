"""Start real ranks: of a script as a launcher does, or of a function in a second.

Functions run in processes that are forked from one which has imported everything.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import psutil

T = TypeVar("T")
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
        self.processes: list[Any] = [
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()  # no rank survives its test

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


_BASE = {
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # a machine with GPUs tests the same
    "DS_ACCELERATOR": "cpu",
}
_PRELOADED = [
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # compiles at its import
    "google.cloud.storage",
    "refocused.commands.train",
    "refocused.models.resonance",
    "refocused.models.ten",
    "refocused.monitor.run_reader",
    "refocused.monitor.screen.summary",
    "refocused.train.lifecycle.trainer",
    "setuptools",  # DeepSpeed asks it for compilers
    "torch.profiler._cupti_monitor",
    "transformers.models.gpt2.modeling_gpt2",
]
Command = Callable[[list[str]], int]
_context = multiprocessing.get_context("forkserver")


class ForkedRanks(Ranks):
    """As `Ranks`, for a function in place of a script and without the seconds of its imports."""

    def __init__(
        self,
        count: int,
        arguments: Sequence[str],
        *,
        folder: Path,
        others: Mapping[int, Sequence[str]] | None = None,
        environment: Mapping[str, str] | None = None,
        local_ranks: Sequence[int] | None = None,
        places: Sequence[Path] | None = None,
        command: Command | None = None,
    ) -> None:
        """Start ranks with the same arguments, but those that `others` gives to single ranks.

        They train, as `launch/train.py` does, unless there is another command. `places` are the
        folders that they work in, in place of `folder`: those of machines that share no disk.
        """
        _start_server()
        self._logs = folder / f"ranks-{time.monotonic_ns()}"
        self._logs.mkdir(parents=True)
        shared = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            **(environment or {}),
        }
        self.processes = [
            ForkedRank(
                list((others or {}).get(rank, arguments)),
                folder=places[rank] if places else folder,
                logs=self._logs,
                environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                command=command or _train,
            )
            for rank, local_rank in enumerate(local_ranks or range(count))
        ]


class ForkedRank:
    """One rank, with the part of `subprocess.Popen` that `Ranks` uses."""

    def __init__(
        self,
        arguments: list[str],
        *,
        folder: Path,
        logs: Path,
        environment: Mapping[str, str],
        command: Command,
    ) -> None:
        for kind in ("out", "err"):
            (logs / f"{environment['RANK']}.{kind}").touch()
        self._process = _context.Process(
            target=_run, args=(command, arguments, folder, logs, dict(environment)), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None  # it was started
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)


def train(
    folder: Path,
    *arguments: str,
    ranks: int = 1,
    others: Mapping[int, Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 60,
    code: int = 0,
    command: Command | None = None,
) -> Ended:
    """Train until all ranks have ended with a code."""
    with ForkedRanks(
        ranks, arguments, folder=folder, others=others, environment=environment, command=command
    ) as started:
        ended = started.wait(timeout)
    assert ended.codes == [code] * ranks, ended.everything
    return ended


def on_ranks(
    function: Callable[..., T],
    *arguments: object,
    folder: Path,
    ranks: int = 2,
    timeout: float = 240,
) -> list[T]:
    """Return the results of `function(world, *arguments)` on real ranks, which work in a folder.

    The function is one of a module; arguments and results are of any type that pickles. What the
    ranks print is in `folder/ranks-*`.
    """
    call = functools.partial(_call, pickle.dumps((function, arguments)))
    train(folder, ranks=ranks, timeout=timeout, command=call)
    files = [folder / f"result-{rank}.pickle" for rank in range(ranks)]
    return [pickle.loads(file.read_bytes()) for file in files]


def _call(pickled: bytes, arguments: list[str]) -> NoReturn:
    """Join the ranks with all modules imported, call a function, and exit with the other ranks."""
    from refocused.engine.deepspeed_patches import load_deepspeed
    from refocused.models.families import register_families
    from refocused.system.world import join_world
    from refocused.train.step.garbage_collection import quick_imports

    with quick_imports():
        world = join_world("cpu")
        register_families()
        load_deepspeed()
        function, given = pickle.loads(pickled)
    result = function(world, *given)
    Path(f"result-{world.rank}.pickle").write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    with contextlib.suppress(RuntimeError):  # another rank has left, which the function allows
        world.barrier()
    os._exit(0)  # gloo's threads sometimes abort an ordinary exit


def _start_server() -> None:
    """Start the process that ranks are forked from; it lives as long as the tests."""
    before = {name: os.environ.get(name) for name in _BASE}
    os.environ.update(_BASE)
    _context.set_forkserver_preload(_PRELOADED)
    multiprocessing.forkserver.ensure_running()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def _run(
    command: Command, arguments: list[str], folder: Path, logs: Path, environment: dict[str, str]
) -> None:
    """Run the command as a rank, with its environment, folder and output files."""
    gc.freeze()  # a collection would touch, and so copy, the server's memory
    os.environ.update(environment)
    os.chdir(folder)
    for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
        file = logs / f"{environment['RANK']}.{kind}"
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    sys.exit(command(arguments))


def _train(arguments: list[str]) -> int:
    from refocused.commands.train import main

    return main(arguments)


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


@contextlib.contextmanager
def launched(
    folder: Path, *command: str | Path, **variables: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a launcher of ranks in a folder; kill all that it started at the end.

    Yields its process, and the file of its output, to which several starts are appended.
    """
    log = folder / "launcher.out"
    marked = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TMPDIR": str(folder)}
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **marked, "PYTHONPATH": str(ROOT), **variables},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, log
    finally:
        for started in carrying("TMPDIR", str(folder)):
            started.kill()
        process.wait()


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
