"""A run with a bucket and real mirror processes."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints.step_samples import PREFIX
from ranks import until

from refocused.checkpoints.mirror.mirror import CheckpointMirror, MirrorSettings, MirrorStatus
from refocused.checkpoints.step.checkpoint_directory import checkpoint_paths, read_checkpoint
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED
from refocused.checkpoints.step.verify import verify
from refocused.system.processes import this_process

TIMEOUT_SECONDS = 30


def drain(
    mirror: CheckpointMirror,
    timeout_s: float = TIMEOUT_SECONDS,
    progress: Callable[[MirrorStatus | None], None] | None = None,
) -> bool:
    mirror.request_drain(timeout_s)
    return bool(mirror.await_drain(timeout_s, progress))


class Place:
    """A run with its bucket, a folder, and the mirrors between them."""

    def __init__(self, root: Path) -> None:
        self.run = root / "run"
        self.checkpoints = self.run / "checkpoints"
        self.bucket = root / "bucket"
        self.checkpoints.mkdir(parents=True)
        self.mirrors: list[CheckpointMirror] = []

    def mirror(self, **settings: Any) -> CheckpointMirror:
        """Start a mirror."""
        usual: dict[str, Any] = {
            "run": self.run,
            "bucket": str(self.bucket),
            "prefix": PREFIX,
            "training": this_process(),
            "drain_seconds": 20.0,
            "scan_seconds": 0.05,
            "longest_wait_seconds": 0.2,
        }
        mirror = CheckpointMirror(MirrorSettings(**usual | settings))
        self.mirrors.append(mirror)
        mirror.start()
        return mirror

    def close(self) -> None:
        """Make the bucket reject everything, until `open`."""
        self.bucket.write_text("a file where the folder should be")

    def open(self) -> None:
        self.bucket.unlink()

    def status(self) -> MirrorStatus:
        status = self.mirrors[-1].status()
        assert status is not None
        return status

    def says(self, condition: Callable[[MirrorStatus], object]) -> None:
        """Wait until the newest mirror reports something."""
        until(lambda: (status := self.mirrors[-1].status()) is not None and condition(status))

    def has_mirrored(self, *steps: int) -> None:
        self.says(lambda status: status.mirrored == steps and status.last_error is None)

    def committed(self) -> list[int]:
        """Return the committed steps of the bucket, and check that each is complete."""
        steps = []
        for path in checkpoint_paths(self.bucket / PREFIX).values():
            if (path / COMMITTED).exists():
                assert verify(read_checkpoint(path), deep=True) == []
                steps.append(read_checkpoint(path).step)
        return steps

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Terminate the newest mirror, and wait for its exit."""
        process = self.status().process
        if process.alive:
            os.kill(process.pid, number)
        until(lambda: not process.alive)  # a request is retried for 30 s and more

    def end(self) -> None:
        """Kill all mirrors."""
        for mirror in self.mirrors:
            if mirror.process is not None and mirror.process.alive:
                os.kill(mirror.process.pid, signal.SIGKILL)
