"""How trainer and mirror communicate: the mirror's settings, its files in the run, its status."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pydantic

from refocused.checkpoints.step.branches import FIRST_BRANCH, Branch
from refocused.system.processes import ProcessIdentity

BLOCKED = "blocked: "


class MirrorSettings(pydantic.BaseModel):
    """The settings of the background process."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    run: Path  # the run's folder
    bucket: str  # `gs://bucket/prefix` or a folder
    prefix: str  # of this run's steps below it
    branch: Branch = FIRST_BRANCH  # the checkpoints that are copied
    training: ProcessIdentity  # when it is gone, the mirror finishes its queue and exits
    credentials_file: Path | None = None  # for `gs://`; None: what the environment offers
    project: str | None = None  # None: that of the credentials
    drain_seconds: float = 1800.0  # longest time to finish the queue when training is gone
    scan_seconds: float = 1.0  # between two looks at the folder
    longest_wait_seconds: float = 60.0  # between attempts; every wait when the bucket refuses us
    threads: int = 4  # uploads at once
    keep_remote: int | None = None  # newest rolling steps that stay in the bucket; None: all
    # The machine, of `nodes` that each mirror their own part. The first one also removes old steps
    # from the bucket and points to the newest.
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
    """The mirror's last report."""

    model_config = pydantic.ConfigDict(frozen=True)

    bucket: str
    prefix: str
    process: ProcessIdentity  # the mirror itself
    heartbeat: float  # Unix time of this status, in seconds
    mirrored: tuple[int, ...] = ()  # local steps that the bucket holds whole, with their marker
    waiting: tuple[int, ...] = ()  # those that it lacks; the first is the one being copied
    skipped: tuple[int, ...] = ()  # older ones that newer ones replace; not waited for at the end
    unwanted: tuple[int, ...] = ()  # those that `keep_remote` would remove at once
    failed: dict[int, str] = {}  # why a step cannot be copied: damaged here, or another one there
    done_bytes: int = 0  # of the step being copied
    total_bytes: int = 0
    last_error: str | None = None  # of the last attempt; `blocked: ...` when retrying cannot help
    drained: str | None = None  # token of the request to finish that was answered

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
