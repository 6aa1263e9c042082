"""Ranks that start in a second: forked from a process that has imported everything."""

import contextlib
import gc
import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ranks import Ended, Ranks, free_port

from refocused.system.world import World, join_world

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
    started = ForkedRanks(
        ranks, arguments, folder=folder, others=others, environment=environment, command=command
    )
    with contextlib.ExitStack() as stack:
        stack.callback(started.kill)  # no rank survives a time-out
        ended = started.wait(timeout)
    assert ended.codes == [code] * ranks, ended.everything
    return ended


def measured(
    module: str, folder: Path, *, ranks: int = 2, timeout: float = 240
) -> tuple[list[Any], str]:
    """Call a module's `measure(world, folder)` on ranks.

    Returns:
        What it returned on each rank (as JSON carries it), and all that the ranks printed.
    """
    started = ForkedRanks(ranks, [module, str(folder)], folder=folder, command=_measure)
    ended = started.wait(timeout)
    assert ended.codes == [0] * ranks, ended.everything
    files = [folder / f"{rank}_of_{ranks}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files], ended.everything


def join_ready() -> World:
    """Join the ranks with everything imported and exempt from garbage collection."""
    from refocused.engine.deepspeed_patches import load_deepspeed
    from refocused.models.families import register_families
    from refocused.train.step.garbage_collection import quick_imports

    with quick_imports():
        world = join_world("cpu")
        register_families()
        load_deepspeed()
    return world


def leave(world: World) -> NoReturn:
    """Exit together with all other ranks."""
    world.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort an ordinary exit


def _measure(arguments: list[str]) -> int:
    module, folder = arguments
    world = join_ready()
    found = importlib.import_module(module).measure(world, Path(folder))
    file = Path(folder) / f"{world.rank}_of_{world.world_size}.json"
    file.write_text(json.dumps(found))
    leave(world)


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
