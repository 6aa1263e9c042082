"""The background copy of a run's checkpoints, as all ranks see it together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from refocused.checkpoints.mirror.mirror import CheckpointMirror
from refocused.checkpoints.mirror.mirror_status import MirrorStatus
from refocused.checkpoints.step.branches import Branch, saved_steps
from refocused.system.world import World

DRAIN_SLICE_S = 1.0  # between two looks at whether somebody wants to wait no longer


class Mirroring:
    """Starts the mirrors, tells of them and waits for them.

    Args:
        mirror: This storage rank's; None on all other ranks, and where nothing is mirrored.
        report: Takes the kind of an event and its text.
        world: The ranks.
    """

    def __init__(
        self,
        mirror: CheckpointMirror | None,
        *,
        report: Callable[[str, str], None],
        world: World,
    ) -> None:
        self._mirror = mirror
        self._report = report
        self._world = world
        self._blocked = False

    @property
    def exists(self) -> bool:
        """Whether this rank has a mirror."""
        return self._mirror is not None

    def start(self) -> None:
        """Start the background copies; all ranks call together."""
        self._world.on_storage_ranks(lambda: self._mirror.start() if self._mirror else None)

    def status(self) -> MirrorStatus | None:
        """Return what this rank's mirror says; None: it has said nothing, or is not there."""
        return self._mirror.status() if self._mirror is not None else None

    @property
    def skipped_uploads(self) -> int:
        """Local steps that the mirror left out at the end, since newer ones replace them."""
        status = self.status()
        return len(status.skipped) if status is not None else 0

    def watch(self) -> None:
        """Tell once when the bucket refuses the mirror, and once when it takes it again."""
        status = self.status()
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
        """Start this rank's mirror again if it died; return what to say of it behind a save.

        Args:
            folder: Of the steps.
            branch: The branch that is copied.
        """
        if self._mirror is None:
            return ""
        self._mirror.ensure_alive()
        status, local = self._mirror.status(), saved_steps(folder, branch)
        return f" | {status.progress(local) if status else 'upload queued'}"

    def drain(
        self,
        timeout_s: float,
        progress: Callable[[MirrorStatus | None], None],
        given_up: Callable[[], int] = lambda: 0,
    ) -> bool:
        """Wait until the bucket holds everything; return whether it does, everywhere.

        All ranks call together.

        Args:
            timeout_s: Longest wait, in seconds.
            progress: Told on rank 0 how far it is; None while the mirror has said nothing.
            given_up: Whether to wait no longer; the same on every rank, which all ask it about
                every second.
        """
        requests = self._world.on_storage_ranks(
            lambda: self._mirror.request_drain(timeout_s) if self._mirror else None
        )
        request = requests[self._world.storage_rank]
        while True:
            finished = self._world.on_storage_ranks(
                lambda: (
                    self._mirror.await_drain(request, DRAIN_SLICE_S, progress)
                    if self._mirror
                    else True
                )
            )
            if False in finished:
                return False
            if all(finished):
                return True
            if given_up():
                return False
