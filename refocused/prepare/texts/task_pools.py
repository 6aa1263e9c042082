"""Where tokenization tasks run: processes of this machine, of a SLURM job, or a Ray cluster."""

import contextlib
import functools
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import refocused
from refocused.bucket.partial_files import disk_errors
from refocused.prepare.texts.text_inputs import Span, Task
from refocused.prepare.texts.tokenize_worker import (
    RESULT,
    TaskResult,
    TokenizeRequest,
    Worker,
    read_result,
    run_task,
    start_worker,
    task_file,
    task_files,
)
from refocused.system.errors import RefocusedError, ShardError, how_to_install

RETRIES = 3  # of a task whose Ray worker was lost
LOST_SECONDS = 300.0  # that the packing process waits for a task of another process
_POLL_SECONDS = 0.1
_BLOCK_BYTES = 8 * 1024 * 1024


# `submit`, which returns how to wait for a task, whose files are then in the folder; and how many
# tasks run at a time.
Tasks = tuple[Callable[[int, tuple[Span, ...]], Callable[[], TaskResult]], int]
Pool = contextlib.AbstractContextManager[Tasks]


@contextlib.contextmanager
def local_pool(request: TokenizeRequest, folder: Path, workers: int) -> Iterator[Tasks]:
    """Start processes; an error ends them after their present document."""
    # Forked processes would inherit threads and the bucket's connections.
    context = multiprocessing.get_context("spawn")
    stopping = context.Event()
    pool = ProcessPoolExecutor(
        workers, context, initializer=start_worker, initargs=(request, folder, stopping)
    )
    try:
        yield lambda *task: pool.submit(run_task, *task).result, workers
    finally:
        stopping.set()
        pool.shutdown(wait=True, cancel_futures=True)


class SharedTasks:
    """Tasks of the processes of a SLURM step, which share a folder.

    A task is run by the process that creates its claim, a file of this attempt of the job. Should
    two run it, they write the same files.
    """

    def __init__(self, request: TokenizeRequest, folder: Path) -> None:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        self._attempt = "-".join(os.environ.get(name, "0") for name in names)
        self._folder = folder
        self._worker = Worker(request, folder)

    def wait(self, number: int, spans: tuple[Span, ...]) -> TaskResult:
        """Return a task's result; run the task if no other process does, or it is lost."""
        began = time.monotonic()
        while (result := read_result(self._folder, number)) is None:
            if self._claims(number) or time.monotonic() > began + LOST_SECONDS:
                return self._worker.run(number, spans)
            time.sleep(_POLL_SECONDS)
        return result

    def help(self, tasks: Sequence[Task], *, first: int) -> None:
        """Run all free tasks; one that fails is left to the packing process, which reports it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in range(first, len(tasks)):
            if not task_file(self._folder, number, RESULT).exists() and self._claims(number):
                try:
                    self._worker.run(number, tasks[number].spans)
                except RefocusedError:
                    self._claim(number).unlink(missing_ok=True)

    def _claim(self, number: int) -> Path:
        return self._folder / f"task_{number:06d}.{self._attempt}.claim"

    def _claims(self, number: int) -> bool:
        try:
            self._claim(number).touch(exist_ok=False)
        except (FileExistsError, FileNotFoundError):  # claimed; or packed, and the folder removed
            return False
        return True


@contextlib.contextmanager
def shared_pool(request: TokenizeRequest, folder: Path, _workers: int) -> Iterator[Tasks]:
    """Use the tasks that other processes run in the folder, and run those that nobody does."""
    tasks = SharedTasks(request, folder)
    yield lambda *task: functools.partial(tasks.wait, *task), 1


def stream_task(
    request: TokenizeRequest, version: str, number: int, spans: tuple[Span, ...]
) -> Iterator[bytes]:
    """Run a task, and yield its files in blocks; an empty block follows each file."""
    if version != refocused.__version__:
        raise ShardError(
            f"{socket.gethostname()}: refocused {refocused.__version__} is installed here, "
            f"{version} where the command runs. Install one version on all hosts."
        )
    with tempfile.TemporaryDirectory() as name:
        Worker(request, Path(name)).run(number, spans)
        for path in task_files(Path(name), number):
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    yield block
            yield b""


@contextlib.contextmanager
def ray_pool(request: TokenizeRequest, folder: Path, _workers: int) -> Iterator[Tasks]:
    """Join the Ray cluster of RAY_ADDRESS or of this machine; if there is none, start one here.

    Each task's files arrive in a thread of this process as soon as the task ends, so a lost host
    costs only its present tasks. Raises `ShardError` if Ray is not installed or out of reach.
    """
    try:
        import ray
    except ModuleNotFoundError:
        fix = how_to_install("ray")
        raise ShardError(f"--executor ray needs Ray. Install it: {fix}") from None
    joined = ray.is_initialized()
    if not joined:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            address = os.environ.get("RAY_ADDRESS", "this machine's address")
            raise ShardError(
                f"There is no Ray cluster at {address} ({error}). Start it, or set RAY_ADDRESS; "
                "without RAY_ADDRESS, a cluster of this machine is started."
            ) from None
    workers = max(int(ray.cluster_resources().get("CPU", 1)), 1)
    threads = ThreadPoolExecutor(2 * workers)
    task, running = ray.remote(max_retries=RETRIES)(stream_task), dict[int, Any]()

    def run(number: int, spans: tuple[Span, ...]) -> TaskResult:
        """Run a task, and write its files to the folder."""
        blocks = running[number] = task.remote(request, refocused.__version__, number, spans)
        try:
            for path in task_files(folder, number):
                part = path.with_name(f"{path.name}.part")
                with disk_errors(part), part.open("wb") as file:
                    while block := ray.get(next(blocks)):
                        file.write(block)
                part.replace(path)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            reason = str(error).partition("\n")[0]
            raise ShardError(
                f"Task {number} lost its Ray worker {RETRIES + 1} times ({reason}). Run the same "
                "command again: it continues from here."
            ) from None
        finally:
            del running[number]
        result = read_result(folder, number)
        assert result is not None  # its files were just written
        return result

    try:
        yield lambda *task: threads.submit(run, *task).result, workers
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for blocks in list(running.values()):  # so that their threads end
            ray.cancel(blocks, force=True)
        threads.shutdown()
        if not joined:
            ray.shutdown()
