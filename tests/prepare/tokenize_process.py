"""Tokenize as `prepare_data tokenize` does, in small slow tasks that are logged to a file."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from refocused.prepare.texts import task_pools, text_inputs, tokenize_worker
from refocused.prepare.texts.text_inputs import Span
from refocused.prepare.texts.tokenize_worker import TaskResult, Worker

text_inputs.TASK_BYTES = int(os.environ["TASK_BYTES"])
task_pools.LOST_SECONDS = float(os.environ.get("LOST_SECONDS", "60"))
_run = Worker.run


def slow_run(worker: Worker, number: int, spans: Iterable[Span]) -> TaskResult:
    with Path(os.environ["TASK_LOG"]).open("a") as log:
        log.write(f"{number}\n")
    time.sleep(float(os.environ["TASK_SECONDS"]))
    return _run(worker, number, spans)


# Also in the processes of the pool, which import this file again.
tokenize_worker.Worker.run = slow_run  # type: ignore[method-assign]


def slow_stream(*task: Any) -> Iterator[bytes]:
    """A task on Ray, whose processes import this package unchanged."""
    with Path(os.environ["TASK_LOG"]).open("a") as log:
        log.write(f"{task[2]}\n")
    time.sleep(float(os.environ["TASK_SECONDS"]))
    yield from task_pools.stream_task(*task)


if __name__ == "__main__":
    # Ray sends functions of the main program by value.
    task_pools.stream_task = slow_stream
    from refocused.commands.main import run_command

    sys.exit(run_command("prepare_data", sys.argv[1:]))
