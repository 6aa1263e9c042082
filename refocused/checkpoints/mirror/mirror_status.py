"""What the mirror is told, and what it tells: its settings, its files in the run, its status."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import pydantic

from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch
from refocused.system.processes import ProcessIdentity

BLOCKED = "blocked: "


class MirrorSettings(pydantic.BaseModel):
    """Everything the background process needs to know.

    Attributes:
        run: The run's folder.
        bucket: `gs://bucket/prefix` or a folder.
        prefix: Where this run's steps are below it.
        branch: The branch of the run whose checkpoints are copied.
        training: The process whose checkpoints are mirrored; when it is gone, the queue is
            finished and the mirror ends.
        credentials_file: Key file for `gs://`; None: what the environment offers.
        project: Google Cloud project; None: that of the credentials.
        drain_seconds: Longest time to finish the queue when training is gone, in seconds.
        scan_seconds: Time between two looks at the folder, in seconds.
        longest_wait_seconds: Longest wait between two attempts when the bucket is down, and every
            wait when it refuses us.
        threads: Uploads at once.
        keep_remote: Newest rolling steps that stay in the bucket; None: all stay.
        node: The machine, of those that each mirror their own part. The first one also removes old
            steps from the bucket and points to the newest.
        nodes: Such machines; 1: the run's folder is whole.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    run: Path
    bucket: str
    prefix: str
    branch: Branch = FIRST_BRANCH
    training: ProcessIdentity
    credentials_file: Path | None = None
    project: str | None = None
    drain_seconds: float = 1800.0
    scan_seconds: float = 1.0
    longest_wait_seconds: float = 60.0
    threads: int = 4
    keep_remote: int | None = None
    node: int = 0
    nodes: int = 1

    @pydantic.field_validator("run", "credentials_file")
    @classmethod
    def _anywhere(cls, path: Path | None) -> Path | None:
        return path.expanduser().absolute() if path is not None else None

    @pydantic.field_validator("bucket")
    @classmethod
    def _bucket_anywhere(cls, url: str) -> str:
        """A folder's path is written to the status, which is read from other folders."""
        return url if "://" in url else str(Path(url).expanduser().absolute())

    @property
    def files(self) -> MirrorFiles:
        """The mirror's files in the run's folder."""
        return MirrorFiles(self.run)


@dataclasses.dataclass(frozen=True, slots=True)
class MirrorFiles:
    """Where the mirror and those who ask it meet, in the run's folder."""

    run: Path

    @property
    def checkpoints(self) -> Path:
        """The step directories."""
        return self.run / "checkpoints"

    @property
    def status(self) -> Path:
        """What the mirror is doing; replaced whole."""
        return self.run / "mirror.json"

    @property
    def lock(self) -> Path:
        """Held by the one mirror of the run."""
        return self.run / "mirror.lock"

    @property
    def drain(self) -> Path:
        """A request to finish the queue and end; holds a token that the answer repeats."""
        return self.run / "mirror.drain"

    @property
    def log(self) -> Path:
        """The mirror's own messages."""
        return self.run / "logs" / "mirror.log"

    def read_status(self) -> MirrorStatus | None:
        """What the mirror said last; None: nothing, or nothing that this version can read."""
        try:
            return MirrorStatus.model_validate_json(self.status.read_bytes())
        except (FileNotFoundError, pydantic.ValidationError):
            return None


class MirrorStatus(pydantic.BaseModel):
    """What the mirror said last.

    Attributes:
        bucket: Address it copies to.
        prefix: Where this run's steps are below it.
        process: The mirror itself.
        heartbeat: Unix time of this status, in seconds.
        mirrored: Local steps that the bucket holds whole, with their marker.
        waiting: Committed local steps that it does not hold yet, in the order in which they are
            copied; the first is the one being copied.
        skipped: Older ones of those that it does not hold, rolling saves that wait until nothing
            newer does; at the end nobody waits for them.
        unwanted: Local steps that `keep_remote` would remove at once.
        failed: Steps that cannot be copied, with the reason: damaged here, or another step of
            that name there.
        done_bytes: Bytes of the step being copied that the bucket holds.
        total_bytes: Bytes of that step.
        last_error: Why the last attempt failed (`blocked: ...` when trying again cannot help by
            itself); None once an attempt succeeds.
        drained: Token of the request to finish that was answered.
    """

    model_config = pydantic.ConfigDict(frozen=True)

    bucket: str
    prefix: str
    process: ProcessIdentity
    heartbeat: float
    mirrored: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    skipped: tuple[int, ...] = ()
    unwanted: tuple[int, ...] = ()
    failed: dict[int, str] = {}
    done_bytes: int = 0
    total_bytes: int = 0
    last_error: str | None = None
    drained: str | None = None

    @property
    def alive(self) -> bool:
        """Whether the mirror that wrote this still runs."""
        return self.process.alive

    @property
    def blocked(self) -> bool:
        """Whether trying again cannot help by itself: no permission, no such bucket."""
        return (self.last_error or "").startswith(BLOCKED)

    def progress(self, saved: Collection[int]) -> str:
        """Say up to which step the bucket has the run, and what is left.

        Args:
            saved: The local steps; the newest may not be known to this status yet.
        """
        newest = max(self.mirrored, default=None)
        known = {*self.mirrored, *self.unwanted, *self.failed}
        behind = len(set(saved) - known)
        text = "nothing mirrored yet" if newest is None else f"mirrored up to step {newest:,}"
        parts = [text, f"{behind} behind"] if behind else [text]
        if self.failed:
            parts.append(f"{len(self.failed)} cannot be copied")
        return ", ".join([*parts, f"last error: {self.last_error}"] if self.last_error else parts)
