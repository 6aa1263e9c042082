"""How trainer and mirror communicate: the mirror's settings, its files in the run, its status."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pydantic

from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch
from refocused.system.processes import ProcessIdentity

BLOCKED = "blocked: "


class MirrorSettings(pydantic.BaseModel):
    """The settings of the background process.

    Attributes:
        run: The run's folder.
        bucket: `gs://bucket/prefix` or a folder.
        prefix: Where this run's steps are below it.
        branch: The branch of the run whose checkpoints are copied.
        training: The process whose checkpoints are mirrored; when it is gone, the mirror finishes
            its queue and exits.
        credentials_file: Key file for `gs://`; None: what the environment offers.
        project: Google Cloud project; None: that of the credentials.
        drain_seconds: Longest time to finish the queue when training is gone.
        scan_seconds: Time between two looks at the folder.
        longest_wait_seconds: Longest wait between two attempts when the bucket is down, and every
            wait when it refuses us.
        threads: Uploads at once.
        keep_remote: Newest rolling steps that stay in the bucket; None: all stay.
        node: The machine, of `nodes` that each mirror their own part. The first one also removes
            old steps from the bucket and points to the newest.
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
    def _absolute(cls, path: Path | None) -> Path | None:
        return path.expanduser().absolute() if path is not None else None

    @pydantic.field_validator("bucket")
    @classmethod
    def _absolute_folder(cls, url: str) -> str:
        """The status holds the path, and is read from other folders."""
        return url if "://" in url else str(Path(url).expanduser().absolute())

    @property
    def files(self) -> MirrorFiles:
        """The mirror's files in the run's folder."""
        return MirrorFiles(self.run)


class MirrorFiles:
    """The files in a run's folder by which the mirror and others communicate."""

    def __init__(self, run: Path) -> None:
        self.checkpoints = run / "checkpoints"
        self.status = run / "mirror.json"  # what the mirror is doing; replaced whole
        self.lock = run / "mirror.lock"  # held by the one mirror of the run
        self.drain = run / "mirror.drain"  # asks to finish the queue; the answer repeats its token
        self.log = run / "logs" / "mirror.log"

    def read_status(self) -> MirrorStatus | None:
        """Return the mirror's last status; None: there is none that this version can read."""
        try:
            return MirrorStatus.model_validate_json(self.status.read_bytes())
        except (FileNotFoundError, pydantic.ValidationError):
            return None


class MirrorStatus(pydantic.BaseModel):
    """The mirror's last report.

    Attributes:
        bucket: Address it copies to.
        prefix: Where this run's steps are below it.
        process: The mirror itself.
        heartbeat: Unix time of this status, in seconds.
        mirrored: Local steps that the bucket holds whole, with their marker.
        waiting: Committed local steps that it does not hold yet, in the order in which they are
            copied; the first is the one being copied.
        skipped: Older ones of those that it does not hold, rolling saves that wait until nothing
            newer does; at the end they are not waited for.
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
        """Say up to which step the bucket has the run, and what is left of the `saved` local steps.

        The newest of those may not be known to this status yet.
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
