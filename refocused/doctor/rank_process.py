"""What each rank of the doctor's trial runs: an all-reduce, and one step of the run."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pydantic

from refocused.system.errors import RefocusedError
from refocused.system.world import World, join_world, lost_connection

REPEATS = 10


class RankTask(pydantic.BaseModel):
    """What the doctor asks of its ranks.

    Attributes:
        device: `run.device`.
        payload_bytes: What the ranks sum; 0: nothing.
        config: Run file whose first step is made; None: none is.
        overrides: Settings that differ from it.
        name: Of the run; None: as the file says.
        folder: Stands in for the run's.
        credentials_file: Key file for `gs://`.
        project: Google Cloud project.
    """

    model_config = pydantic.ConfigDict(frozen=True)

    device: str
    payload_bytes: int
    config: str | None
    overrides: tuple[str, ...]
    name: str | None
    folder: Path
    credentials_file: Path | None
    project: str | None


def main(text: str) -> int:
    """Do what is asked; each result is a line of JSON on stdout."""
    task = RankTask.model_validate_json(text)
    threading.Thread(target=_end_with_the_doctor, daemon=True).start()
    doing = "join"
    try:
        world = join_world(task.device)
        os.environ["DS_ACCELERATOR"] = world.device_kind  # or DeepSpeed searches, with warnings
        _tell(world, "joined", device=world.device_name)
        doing = "allreduce"
        if task.payload_bytes:
            _tell(world, doing, **measure_allreduce(world, payload_bytes=task.payload_bytes))
        doing = "step"
        if task.config is not None:
            _tell(world, doing, **_step(task, world))
        world.leave()
    except RefocusedError as error:
        return _failed(doing, str(error), is_echo=False)
    except Exception as error:
        lost = lost_connection(error)
        traceback.print_exc()
        text = str(lost) if lost is not None else f"{type(error).__name__}: {error}"
        return _failed(doing, text, is_echo=lost is not None)
    return 0


def measure_allreduce(world: World, *, payload_bytes: int) -> dict[str, Any]:
    """Sum a vector over the ranks, and say how fast and whether rightly; every rank must call.

    The bus bandwidth is that of the slowest link if the ranks form a ring: 2 (n - 1) / n of the
    payload pass each (NCCL tests, doc/PERFORMANCE.md).
    """
    import torch
    import torch.distributed as dist

    vector = torch.ones(payload_bytes // 4, device=world.device)
    dist.all_reduce(vector)
    is_right = bool((vector == world.world_size).all())
    vector.zero_()
    seconds = []
    for _ in range(REPEATS):
        world.barrier()
        began = time.perf_counter()
        dist.all_reduce(vector)
        vector[0].item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    slowest = world.largest([statistics.median(seconds)])[0]
    share = 2 * (world.world_size - 1) / world.world_size
    wrong = world.largest([not is_right])[0]
    return {
        "is_right": not wrong,
        "payload_bytes": payload_bytes,
        "seconds": slowest,
        "bus_bytes_per_second": share * payload_bytes / slowest,
    }


def _step(task: RankTask, world: World) -> dict[str, Any]:
    from refocused.config.load_run import load_run
    from refocused.train.lifecycle.job import Request
    from refocused.train.lifecycle.session import begin_session
    from refocused.train.lifecycle.trial import take_trial_step

    assert task.config is not None
    step = take_trial_step(
        load_run(task.config, task.overrides, name=task.name),
        Request(
            resume="none",
            dry_run=True,
            credentials_file=task.credentials_file,
            project=task.project,
            command="doctor",
        ),
        world,
        begin_session(world.rank),
        folder=task.folder,
    )
    return dataclasses.asdict(step)


def _tell(world: World, what: str, **facts: Any) -> None:
    if world.is_rank_0:
        print(json.dumps({"what": what, **facts}), flush=True)


def _failed(doing: str, text: str, *, is_echo: bool) -> int:
    print(json.dumps({"what": "failed", "doing": doing, "text": text, "is_echo": is_echo}))
    return 1


def _end_with_the_doctor() -> None:
    """End when the doctor, which holds the other end of stdin, has ended in whatever way."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads abort an ordinary end now and then
