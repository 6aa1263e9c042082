"""Settings, files and status by which the trainer and the mirror communicate."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pydantic

from refocused.bucket.open_bucket import BY_ENVIRONMENT, Credentials
from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch
from refocused.system.processes import ProcessIdentity

BLOCKED = "blocked: "


class MirrorSettings(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The settings of the background process."""

    run: Path  # the run's folder
    bucket: str  # `gs://bucket/prefix` or a folder
    prefix: str  # of this run's checkpoints below it
    branch: Branch = FIRST_BRANCH  # whose checkpoints are copied
    training: ProcessIdentity  # after its exit the mirror finishes its queue and exits
    lease: str | None = None  # token of the run's lease; None: copy without one
    credentials: Credentials = BY_ENVIRONMENT  # to `gs://`
    drain_seconds: float = 1800.0  # limit for finishing the queue after training
    scan_seconds: float = 1.0  # between two scans of the folder
    longest_wait_seconds: float = 60.0  # between attempts; used at once if the bucket refuses
    threads: int = 4  # parallel uploads
    keep_remote: int | None = None  # newest rolling checkpoints kept in the bucket; None: all
    # This machine, of `nodes` that each mirror their own part. Node 0 also removes old checkpoints
    # from the bucket and writes the pointer to the newest.
    node: int = 0
    nodes: int = 1

    @pydantic.field_validator("run", "bucket")
    @classmethod
    def _absolute(cls, place: Path | str) -> Path | str:
        """Make paths absolute: the status repeats them, and is read from other folders."""
        text = str(place)
        return place if "://" in text else type(place)(Path(text).expanduser().absolute())

    @property
    def files(self) -> MirrorFiles:
        """The mirror's files in the run's folder."""
        return MirrorFiles(self.run)


class MirrorFiles:
    """The mirror's files in the folder of a run."""

    def __init__(self, run: Path) -> None:
        self.checkpoints = run / "checkpoints"
        self.status = run / "mirror.json"
        self.lock = run / "mirror.lock"  # held by the run's mirror
        self.drain = run / "mirror.drain"  # a request to finish; the answer repeats its token
        self.log = run / "logs" / "mirror.log"

    def read_status(self) -> MirrorStatus | None:
        """Return the mirror's last status; None if there is none that this version can read."""
        try:
            return MirrorStatus.model_validate_json(self.status.read_bytes())
        except (FileNotFoundError, pydantic.ValidationError):
            return None


class MirrorStatus(pydantic.BaseModel, frozen=True):
    """The mirror's last report."""

    bucket: str  # its address
    prefix: str  # of the run's checkpoints there
    process: ProcessIdentity  # the mirror itself
    heartbeat: float  # Unix time of this status, in seconds
    mirrored: tuple[int, ...] = ()  # local steps committed in the bucket
    waiting: tuple[int, ...] = ()  # to be copied; the first one is being copied
    skipped: tuple[int, ...] = ()  # replaced by newer ones; not copied when draining
    unwanted: tuple[int, ...] = ()  # those that `keep_remote` would remove at once
    of_other_branches: tuple[str, ...] = ()  # names of local checkpoints, committed in the bucket
    failed: dict[int, str] = {}  # why a step cannot be copied
    done_bytes: int = 0  # of the step being copied
    total_bytes: int = 0  # of that step
    last_error: str | None = None  # of the last attempt; `blocked: ...` if a retry cannot succeed
    drained: str | None = None  # token of the answered request to finish

    @property
    def alive(self) -> bool:
        """Whether the mirror that wrote this is running."""
        return self.process.alive

    @property
    def blocked(self) -> bool:
        """Whether a retry cannot succeed: no permission, no such bucket."""
        return (self.last_error or "").startswith(BLOCKED)

    def progress(self, saved: Collection[int]) -> str:
        """Describe the progress of mirroring the `saved` local steps.

        They are an argument because this status may not list the newest yet.
        """
        newest = max(self.mirrored, default=None)
        behind = len(set(saved) - {*self.mirrored, *self.unwanted, *self.failed})
        parts = ["nothing mirrored yet" if newest is None else f"mirrored up to step {newest:,}"]
        if behind:
            parts.append(f"{behind} behind")
        if self.failed:
            parts.append(f"{len(self.failed)} cannot be copied")
        if self.last_error:
            parts.append(f"last error: {self.last_error}")
        return ", ".join(parts)
