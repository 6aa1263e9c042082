"""A run with its bucket, and the mirrors between them, which are processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from refocused.checkpoints.mirror.mirror import CheckpointMirror
from refocused.checkpoints.mirror.mirror_status import MirrorSettings, MirrorStatus
from refocused.checkpoints.step.branches import checkpoint_paths
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.step_directory import read_step
from refocused.checkpoints.step.verify import verify
from refocused.system.processes import ProcessIdentity, this_process

PREFIX = "sample/checkpoints"
PATIENCE_SECONDS = 30


def drain(
    mirror: CheckpointMirror,
    timeout_s: float = PATIENCE_SECONDS,
    progress: Callable[[MirrorStatus | None], None] | None = None,
) -> bool:
    return bool(mirror.await_drain(mirror.request_drain(timeout_s), timeout_s, progress))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


class Place:
    """A run with its bucket, and the mirrors between them."""

    def __init__(self, root: Path) -> None:
        self.run = root / "run"
        self.checkpoints = self.run / "checkpoints"
        self.bucket = root / "bucket"
        self.checkpoints.mkdir(parents=True)
        self.mirrors: list[CheckpointMirror] = []

    def mirror(
        self,
        training: ProcessIdentity | None = None,
        drain_seconds: float = 20.0,
        keep_remote: int | None = None,
    ) -> CheckpointMirror:
        mirror = CheckpointMirror(
            MirrorSettings(
                run=self.run,
                bucket=str(self.bucket),
                prefix=PREFIX,
                training=training or this_process(),
                drain_seconds=drain_seconds,
                scan_seconds=0.05,
                longest_wait_seconds=0.2,
                keep_remote=keep_remote,
            )
        )
        self.mirrors.append(mirror)
        return mirror

    def status(self) -> MirrorStatus:
        status = self.mirrors[-1].status()
        assert status is not None
        return status

    def says(self, condition: Callable[[MirrorStatus], object]) -> Callable[[], object]:
        def asked() -> object:
            status = self.mirrors[-1].status()
            return status is not None and condition(status)

        return asked

    def committed(self) -> list[int]:
        """The marked steps of the bucket, each of which must be whole."""
        root = self.bucket / PREFIX
        steps = []
        for path in checkpoint_paths(root).values():
            if (path / COMMITTED).exists():
                assert verify(read_step(path), deep=True) == []
                steps.append(read_step(path).step)
        return steps

    def kill(self) -> None:
        status = self.mirrors[-1].status()
        if status is not None and status.alive:
            os.kill(status.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Leave no process behind."""
        for mirror in self.mirrors:
            process = mirror.process
            if process is not None and process.alive:
                os.kill(process.pid, signal.SIGKILL)
