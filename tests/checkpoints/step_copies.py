"""Copying a step to a bucket that notes what it is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from checkpoints.step_samples import copied

from refocused.bucket.bucket import BlobInfo, Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.checkpoints.mirror.remote_steps import RemoteSteps
from refocused.checkpoints.step.step_directory import StepDirectory


class RecordingBucket(DirectoryBucket):
    """Notes what is sent, and can lose an object right after it was stored."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.sent: list[str] = []
        self.lost: str | None = None

    def upload(self, source: Path, name: str, *, crc32c: int | None = None) -> BlobInfo:
        self.sent.append(Path(name).name)
        stored = super().upload(source, name, crc32c=crc32c)
        if self.lost is not None and name.endswith(self.lost):
            self.delete(name)
        return stored


def copy(bucket: Bucket, step: StepDirectory, stopping: Callable[[], bool] = lambda: False) -> bool:
    return copied(RemoteSteps(bucket, "run/"), step, stopping)


def objects(bucket: DirectoryBucket) -> dict[str, bytes]:
    root = Path(bucket.url) / "run" / "checkpoint_step_10"
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }
