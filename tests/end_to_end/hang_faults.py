"""Ranks that hang in a step: a rank trains as usual until the fault of its environment."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from refocused.train.lifecycle import trainer as lifecycle
from refocused.train.step import loop
from refocused.train.step.state import TrainState

STEP, RANK, FAULT = "HANG_STEP", "HANG_RANK", "HANG_FAULT"
INIT_REPLY = struct.pack("<IIIIHHII", 7, 31, 0, 0, 0, 0, 4096, 1)  # FUSE's version, and its sizes


def train(arguments: list[str]) -> int:
    """Train; before the step of the environment its rank has the fault; 0: before its engine."""
    from refocused.commands.train import main

    fault, rank, step = (os.environ[name] for name in (FAULT, RANK, STEP))
    take_step, other = loop.take_step, list[dist.ProcessGroup]()

    def faulty(
        trainer: loop.Trainer, batches: list[loop.Batch], state: TrainState, after: loop.Position
    ) -> loop.StepTaken:
        if fault == "collective" and not other:
            other.append(dist.new_group(backend="gloo"))
        left = (state.step + 1) % int(step) if fault == "late" else state.step + 1 - int(step)
        if left == 0 and trainer.world.rank == int(rank):
            hang(fault, other)
        return take_step(trainer, batches, state, after)

    def faulty_build(*given: Any, **more: Any) -> Any:
        if int(step) == 0 and int(os.environ["RANK"]) == int(rank):
            hang(fault, other)
        return build(*given, **more)

    loop.take_step = faulty
    build, lifecycle.assemble_engine = lifecycle.assemble_engine, faulty_build
    return main(arguments)


def hang(fault: str, other: list[dist.ProcessGroup]) -> None:
    """Do one of the faults in the main thread."""
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "interpreter":
        re.match(r"(a+)+$", "a" * 60 + "b")  # takes years, and keeps the interpreter's lock
    elif fault == "disk":
        Path("dead/file").stat()
    elif fault == "late":
        time.sleep(4)
    elif fault == "collective":
        dist.all_reduce(torch.ones(3), group=other[0])


class DeadDisk:
    """A mounted disk whose server never answers."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._libc = folder, ctypes.CDLL(None, use_errno=True)
        folder.mkdir()
        try:
            self._server = os.open("/dev/fuse", os.O_RDWR)
        except OSError as error:
            pytest.skip(f"no dead disk can be mounted here: {error}")
        options = f"fd={self._server},rootmode=40000,user_id=0,group_id=0".encode()
        if self._libc.mount(b"dead", bytes(folder), b"fuse", 0, options):
            os.close(self._server)
            pytest.skip("no dead disk can be mounted here: mount is not allowed")
        request = struct.unpack_from("<IIQ", os.read(self._server, 1 << 17))
        reply = INIT_REPLY.ljust(64, b"\0")
        os.write(self._server, struct.pack("<IiQ", 16 + len(reply), 0, request[2]) + reply)

    def end(self) -> None:
        """Unmount it, and fail what waits for it."""
        subprocess.run(["umount", "-l", self._folder], check=False)
        os.close(self._server)
