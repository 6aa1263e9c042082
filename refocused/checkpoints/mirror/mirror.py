"""The trainer's handle on the mirror, on one rank and as all ranks use it."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from refocused.checkpoints.mirror.mirror_status import MirrorSettings, MirrorStatus
from refocused.checkpoints.step.branches import Branch, saved_steps
from refocused.checkpoints.step.retention import Copies
from refocused.system.atomic_files import write_bytes_atomic
from refocused.system.errors import CheckpointError
from refocused.system.processes import ProcessIdentity, identify, start_detached
from refocused.system.world import World

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
DRAIN_SLICE_S = 1.0  # between two looks at whether to give up the wait
START_ATTEMPTS = 3  # of a process that something kills before it works (the OOM killer, a person)
Progress = Callable[[MirrorStatus | None], None]  # None: there is no status yet


@dataclasses.dataclass(frozen=True, slots=True)
class DrainRequest:
    """A request to finish the queue."""

    token: str  # that the mirror repeats
    deadline: float  # of waiting, on the monotonic clock


class CheckpointMirror:
    """The background copy of a run's step directories, on a storage rank.

    The copying is done by a detached process that finds new steps by itself, outlives this one only
    to finish its queue, and never blocks training.
    """

    def __init__(self, settings: MirrorSettings) -> None:
        self._settings = settings
        self._files = settings.files
        self.process: ProcessIdentity | None = None  # the one that was started last

    def start(self) -> None:
        """Start the background process, which waits for one that is still finishing."""
        self._files.drain.unlink(missing_ok=True)
        self._files.status.unlink(missing_ok=True)  # retention may not act on an old mirror's word
        self._spawn()

    def status(self) -> MirrorStatus | None:
        """Return the mirror's last status; None: there is none, or it is about another bucket."""
        status, wanted = self._files.read_status(), self._settings
        if status is None or (status.bucket, status.prefix) != (wanted.bucket, wanted.prefix):
            return None
        return status

    def ensure_alive(self) -> bool:
        """Start the process again when it has died; return whether that was needed."""
        if self.process is not None and self.process.alive:
            return False
        logger.warning("The mirror has ended (see %s); it is started again.", self._files.log)
        try:
            self._spawn()
        except CheckpointError as error:
            logger.warning("%s", error)
        return True

    def request_drain(self, timeout_s: float) -> DrainRequest | None:
        """Ask the mirror to finish its queue and exit; None: the disk has no room for the request.

        Without a request it does so when the processes that train are gone.
        """
        request = DrainRequest(secrets.token_hex(8), time.monotonic() + timeout_s)
        try:
            write_bytes_atomic(self._files.drain, request.token.encode())
        except OSError as error:
            logger.warning(
                "The mirror could not be asked to finish: %s (%s). It goes on in the background.",
                error.strerror,
                self._files.drain,
            )
            return None
        return request

    def await_drain(
        self, request: DrainRequest | None, slice_s: float, progress: Progress | None = None
    ) -> bool | None:
        """Wait for at most `slice_s` for the mirror to finish, calling `progress` meanwhile.

        Return whether every committed step is in the bucket; None: it is too early to say.
        """
        if request is None:
            return False
        pause_at = time.monotonic() + slice_s
        while True:
            status, now = self.status(), time.monotonic()
            if status is not None and status.drained == request.token:
                return not status.failed
            if now >= request.deadline:
                return False
            if now >= pause_at:
                return None
            if progress is not None:
                progress(status)
            if self.process is None or not self.process.alive:
                status = self.status()  # it may have answered between two looks and ended rightly
                if status is None or status.drained != request.token:
                    self.ensure_alive()
            left = min(request.deadline, pause_at) - time.monotonic()
            time.sleep(min(POLL_SECONDS, max(0.0, left)))

    def _spawn(self) -> None:
        settings = self._settings.model_dump_json()
        module = "refocused.checkpoints.mirror.mirror_process"
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self.process = identify(start_detached(module, settings, log=self._files.log))
                return
            except (OSError, subprocess.SubprocessError) as error:
                killed = isinstance(error, subprocess.CalledProcessError) and error.returncode < 0
                if killed and attempt < START_ATTEMPTS:
                    logger.warning("The mirror was killed while it started; starting it again.")
                    continue
                raise CheckpointError(
                    f"The mirror could not be started ({error}). Its output is in "
                    f"{self._files.log}; check also the machine's memory and disk."
                ) from error


class Mirroring:
    """Starts the mirrors, reports on them and waits for them."""

    def __init__(
        self,
        mirror: CheckpointMirror | None,  # this storage rank's; None: others, or without a mirror
        *,
        report: Callable[[str, str], None],  # takes the kind of an event and its text
        world: World,
    ) -> None:
        self._mirror = mirror
        self._report = report
        self._world = world
        self._blocked = False

    def start(self) -> None:
        """Start the background copies; all ranks call together."""
        self._world.on_storage_ranks(lambda: self._mirror.start() if self._mirror else None)

    def copies(self) -> Copies | None:
        """Return what retention has to know of the local steps; None: nothing is mirrored."""
        if self._mirror is None:
            return None
        status = self._mirror.status()
        return Copies(status.mirrored, status.skipped, status.unwanted) if status else Copies()

    @property
    def skipped_uploads(self) -> int:
        """Local steps that the mirror left out at the end, since newer ones replace them."""
        copies = self.copies()
        return len(copies.skipped) if copies is not None else 0

    def watch(self) -> None:
        """Report once when the bucket refuses the mirror, and once when it takes it again."""
        status = self._mirror.status() if self._mirror is not None else None
        if status is None or status.blocked == self._blocked:
            return
        self._blocked = status.blocked
        if status.blocked:
            self._report(
                "mirror_failed",
                f"mirror {status.last_error} Training goes on, and every step stays on this disk "
                "until the mirror has it.",
            )
        else:
            self._report("mirror_recovered", "mirror goes on: the bucket takes it again")

    def look_after(self, folder: Path, branch: Branch) -> str:
        """Restart this rank's mirror if it died; return what a save's line ends with."""
        if self._mirror is None:
            return ""
        self._mirror.ensure_alive()
        status, local = self._mirror.status(), saved_steps(folder, branch)
        return f" | {status.progress(local) if status else 'upload queued'}"

    def drain(
        self, timeout_s: float, progress: Progress, given_up: Callable[[], int] = lambda: 0
    ) -> bool:
        """Wait until the bucket holds everything; return whether it does, from every machine.

        All ranks call together, and `given_up`, about every second: whether to stop waiting, the
        same on every rank. `progress` is called on the storage ranks.
        """
        mirror, on_storage_ranks = self._mirror, self._world.on_storage_ranks
        requests = on_storage_ranks(lambda: mirror.request_drain(timeout_s) if mirror else None)
        request = requests[self._world.storage_rank]
        while True:
            finished = on_storage_ranks(
                lambda: mirror.await_drain(request, DRAIN_SLICE_S, progress) if mirror else True
            )
            if False in finished:
                return False
            if all(finished):
                return True
            if given_up():
                return False
