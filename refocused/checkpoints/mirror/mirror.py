"""Start, watch and drain the mirror process, on one rank and on all ranks together.

They communicate by files in the run's folder: its status, and a request to finish.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pydantic

from refocused.bucket.open_bucket import BY_ENVIRONMENT, Credentials
from refocused.checkpoints.step.checkpoint_directory import FIRST_BRANCH, Branch, saved_steps
from refocused.checkpoints.step.retention import MirroredCheckpoints
from refocused.system.atomic_files import replace_file
from refocused.system.errors import CheckpointError
from refocused.system.processes import ProcessIdentity, identify, start_detached
from refocused.system.world import World

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
DRAIN_SLICE_S = 1.0  # between two checks of whether to give up the wait
START_ATTEMPTS = 3  # if the process is killed while it starts, as by the OOM killer
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
    def _absolute(cls, address: Path | str) -> Path | str:
        """Make paths absolute: the status repeats them, and is read from other folders."""
        text = str(address)
        return address if "://" in text else type(address)(Path(text).expanduser().absolute())

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


class MirrorStatus(MirroredCheckpoints, frozen=True):
    """The mirror's last report."""

    bucket: str  # its address
    prefix: str  # of the run's checkpoints in it
    process: ProcessIdentity  # the mirror itself
    heartbeat: float  # Unix time of this status, in seconds
    waiting: tuple[int, ...] = ()  # to be copied; the first one is being copied
    failed: dict[int, str] = pydantic.Field(default_factory=dict)  # why a step cannot be copied
    done_bytes: int = 0  # of the step being copied
    total_bytes: int = 0  # of that step
    last_error: str | None = None  # of the last attempt; `blocked: ...` if a retry cannot succeed
    drained: str | None = None  # token of the answered request to finish
    complete: bool = False  # it has ended: all checkpoints, then the last log lines, were copied

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


Progress = Callable[[MirrorStatus | None], None]  # None: no status yet


class CheckpointMirror:
    """Controls the detached process that copies a run's checkpoints, on a storage rank.

    The process finds new checkpoints by itself, never blocks training, and outlives it only to
    finish its queue.
    """

    def __init__(self, settings: MirrorSettings) -> None:
        self._settings = settings
        self._files = settings.files
        self.process: ProcessIdentity | None = None  # the one started last
        self._drain_token: str | None = None  # of the request; the mirror's answer repeats it
        self._drain_deadline = 0.0  # of the wait, on the monotonic clock

    def start(self, branch: Branch | None = None) -> None:
        """Start the process; it waits until an earlier one has finished.

        With a branch to copy from now on, end the process that copies another one.
        """
        if branch is not None:
            self._settings = self._settings.model_copy(update={"branch": branch})
            if self.process is not None and self.process.alive:
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(self.process.pid, signal.SIGTERM)
        self._files.drain.unlink(missing_ok=True)
        self._files.status.unlink(missing_ok=True)  # retention must not use an old status
        self._spawn()

    def status(self) -> MirrorStatus | None:
        """Return the mirror's last status; None if there is none for this bucket."""
        status, address = self._files.read_status(), (self._settings.bucket, self._settings.prefix)
        return status if status and (status.bucket, status.prefix) == address else None

    def ensure_alive(self) -> bool:
        """Restart the process if it died; return whether it had."""
        if self.process is not None and self.process.alive:
            return False
        logger.warning("The mirror process has died; restarting it. See %s.", self._files.log)
        try:
            self._spawn()
        except CheckpointError as error:
            logger.warning("%s", error)
        return True

    def request_drain(self, timeout_s: float) -> None:
        """Request that the mirror finish its queue and exit, as it does when training exits."""
        token, self._drain_token = secrets.token_hex(8), None
        self._drain_deadline = time.monotonic() + timeout_s
        try:
            replace_file(self._files.drain, token.encode(), durable=True)
            self._drain_token = token
        except OSError as error:
            text = "Cannot request the mirror to finish: %s (%s). It continues in the background."
            logger.warning(text, error.strerror, self._files.drain)

    def await_drain(self, slice_s: float, progress: Progress | None = None) -> bool | None:
        """Wait up to `slice_s` seconds for the mirror to finish, calling `progress` meanwhile.

        Returns:
            Whether every committed checkpoint is in the bucket; None while the mirror works.
        """
        if self._drain_token is None:
            return False
        pause_at = time.monotonic() + slice_s
        while True:
            status, now = self.status(), time.monotonic()
            if status is not None and status.drained == self._drain_token:
                return not status.failed
            if now >= self._drain_deadline:
                return False
            if now >= pause_at:
                return None
            if progress is not None:
                progress(status)
            if self.process is None or not self.process.alive:
                status = self.status()  # it may have answered and exited since the last check
                if status is None or status.drained != self._drain_token:
                    self.ensure_alive()
            left = min(self._drain_deadline, pause_at) - time.monotonic()
            time.sleep(min(POLL_SECONDS, max(0.0, left)))

    def _spawn(self) -> None:
        settings = self._settings.model_dump_json()
        function = "refocused.checkpoints.mirror.mirror_loop:mirror"
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self.process = identify(start_detached(function, settings, log=self._files.log))
                return
            except (OSError, subprocess.SubprocessError) as error:
                killed = isinstance(error, subprocess.CalledProcessError) and error.returncode < 0
                if killed and attempt < START_ATTEMPTS:
                    logger.warning("The mirror was killed while starting; restarting it.")
                    continue
                raise CheckpointError(
                    f"The mirror could not be started ({error}). See its output in "
                    f"{self._files.log}, and check the machine's memory and disk."
                ) from error


class Mirroring:
    """Starts, reports on and drains the mirrors of all storage ranks."""

    def __init__(
        self,
        mirror: CheckpointMirror | None,  # None on other ranks, or without a mirror
        *,
        report: Callable[[str, str], None],  # called with the kind of an event and its text
        world: World,
    ) -> None:
        self._mirror = mirror
        self._report = report
        self._world = world
        self._blocked = False

    def start(self, branch: Branch | None = None) -> None:
        """Start the mirror of each storage rank, also on another branch; all ranks call."""
        self._world.on_storage_ranks(lambda: self._mirror.start(branch) if self._mirror else None)

    def copies(self) -> MirroredCheckpoints | None:
        """Return what retention needs of the mirror's status; None without a mirror."""
        if self._mirror is None:
            return None
        return self._mirror.status() or MirroredCheckpoints()

    @property
    def skipped_uploads(self) -> int:
        """Number of local steps that the mirror skipped in favor of newer ones."""
        return len(copies.skipped) if (copies := self.copies()) else 0

    def watch(self) -> None:
        """Report once when the bucket rejects the mirror, and once when it accepts it again."""
        status = self._mirror.status() if self._mirror is not None else None
        if status is None or status.blocked == self._blocked:
            return
        self._blocked = status.blocked
        if status.blocked:
            text = "Training continues. Checkpoints stay on this disk until they are mirrored."
            self._report("mirror_failed", f"mirror {status.last_error} {text}")
        else:
            self._report("mirror_recovered", "mirror resumed: the bucket accepts uploads again")

    def ensure_alive(self, folder: Path, branch: Branch) -> str:
        """Restart this rank's mirror if it died; return its progress for the log line of a save."""
        if self._mirror is None:
            return ""
        self._mirror.ensure_alive()
        status, local = self._mirror.status(), saved_steps(folder, branch)
        return f" | {status.progress(local) if status else 'upload queued'}"

    def drain(
        self, timeout_s: float, progress: Progress, given_up: Callable[[], int] = lambda: 0
    ) -> bool:
        """Wait until every machine's checkpoints are in the bucket; return whether they are.

        Collective: all ranks call. `given_up` is called on every rank about every second and must
        return the same on all; non-zero ends the wait. `progress` is called on the storage ranks.
        """
        mirror, on_storage_ranks = self._mirror, self._world.on_storage_ranks
        on_storage_ranks(lambda: mirror.request_drain(timeout_s) if mirror else None)
        while True:
            finished = on_storage_ranks(
                lambda: mirror.await_drain(DRAIN_SLICE_S, progress) if mirror else True
            )
            if False in finished or all(finished):
                return all(finished)
            if given_up():
                return False
