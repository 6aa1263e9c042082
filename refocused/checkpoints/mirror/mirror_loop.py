"""The mirror's process at work: watch the run's folder, copy, wait after failures."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType

from refocused.bucket.gcs_errors import RetryPolicy
from refocused.bucket.open_bucket import open_bucket
from refocused.checkpoints.mirror.copy_queue import MIRRORED, CopyOrder, LocalSteps, signature_of
from refocused.checkpoints.mirror.copy_step import StepCopier
from refocused.checkpoints.mirror.mirror_status import BLOCKED, MirrorSettings, MirrorStatus
from refocused.checkpoints.mirror.remote_steps import RemoteRetention, RemoteSteps, is_refusal
from refocused.checkpoints.step.step_directory import StepDirectory, read_step
from refocused.system.atomic_files import write_json_atomic
from refocused.system.errors import BucketError, CheckpointError
from refocused.system.locks import FileLock
from refocused.system.processes import this_process

logger = logging.getLogger(__name__)

FIRST_WAIT_SECONDS = 1.0
MOST_DOUBLINGS = 30
POLL_SECONDS = 0.1  # between two looks for a request
HEARTBEAT_SECONDS = 5.0
STOP_SECONDS = 1.0  # for a request on its way, after SIGTERM


def wait_seconds(failures: int, *, refused: bool, longest: float) -> float:
    """Return the wait after so many failures in a row: doubling, or the longest at once."""
    if refused:
        return longest
    doublings = min(failures - 1, MOST_DOUBLINGS)  # a bucket may be down for thousands of attempts
    return min(FIRST_WAIT_SECONDS * 2.0**doublings, longest)


class MirrorLoop:
    """One mirror at work; exits by itself after training has, or when it is asked to."""

    def __init__(self, settings: MirrorSettings) -> None:
        self._settings = settings
        self._files = settings.files
        self._stopping = False  # a plain flag: an Event's lock is not safe in a signal handler
        self._draining = False
        self._steps = LocalSteps(self._files.checkpoints, settings.branch)
        self._awaiting: set[int] = set()  # parts of other machines
        self._copying: int | None = None
        self._filling_in = False  # with a step that newer ones replace
        self._newest_there = -1
        self._failures = 0
        self._trouble: str | None = None
        self._acquainted = False
        self._status = MirrorStatus(
            bucket=settings.bucket, prefix=settings.prefix, process=this_process(), heartbeat=0.0
        )
        bucket = open_bucket(
            settings.bucket,
            credentials_file=settings.credentials_file,
            project=settings.project,
            retry=RetryPolicy(sleep=self._wait_to_retry, report=self._note_fault),
        )
        self._remote = RemoteSteps(bucket, settings.prefix)
        self._copier = StepCopier(
            self._remote,
            stopping=self._must_stop_copying,
            report=self._on_progress,
            threads=settings.threads,
        )
        self._retention = (
            RemoteRetention(self._remote, settings.branch, keep=settings.keep_remote)
            if settings.keep_remote is not None
            else None
        )

    def run(self) -> None:
        """Mirror until stopped, until the queue is finished, or until the time is up."""
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGALRM, self._on_deadline)
        lock = FileLock(self._files.lock)
        while not lock.acquire():  # the mirror of an earlier start may be finishing its queue
            time.sleep(POLL_SECONDS)
            if self._stopping or not self._settings.training.alive:
                return
        while not self._stopping:
            self._observe_requests()
            order = self._order()
            if order.wanted:
                self._attempt(self._next(order.wanted))
            elif order.skipped and not self._draining:
                self._filling_in = True
                self._attempt(self._next(order.skipped))
                self._filling_in = False
            elif self._draining:
                token = self._files.drain.read_text() if self._files.drain.exists() else None
                self._report(drained=token)
                return
            else:
                self._attempt(None)
                self._wait(self._settings.scan_seconds)

    def _observe_requests(self) -> None:
        """Note whether to finish the queue and exit; the deadline counts from the first time."""
        draining = self._files.drain.exists() or not self._settings.training.alive
        if draining != self._draining and not self._stopping:
            self._draining = draining
            limit = max(self._settings.drain_seconds, 0.001) if draining else 0.0
            signal.setitimer(signal.ITIMER_REAL, limit)

    def _order(self) -> CopyOrder:
        return self._steps.order(copying=None if self._filling_in else self._copying)

    def _next(self, steps: Sequence[int]) -> int:
        """Return the first step that waits for no other machine; retry the rest in a while."""
        for step in steps:
            if step not in self._awaiting:
                return step
        self._wait(self._settings.scan_seconds)
        self._awaiting.clear()
        return steps[0]

    def _attempt(self, step: int | None) -> None:
        """Copy one step, or just see that the bucket can be written; wait when that fails."""
        self._copying = step
        self._report()
        try:
            if not self._acquainted:  # first see that the bucket can be written
                self._remote.introduce()
                self._thin_out()
                self._acquainted = True
            elif step is not None:
                self._copy(self._files.checkpoints / self._name_of(step))
        except (BucketError, OSError) as error:
            self._copying = None
            self._wait_after(error)
        else:
            self._copying = None
            self._failures, self._trouble = 0, None
            self._report(done_bytes=0, total_bytes=0)

    def _copy(self, path: Path) -> None:
        signature, started = signature_of(path), time.monotonic()
        if signature is None:
            return
        try:
            step = read_step(path)
            if not self._copier.copy(step):
                self._await_others(step)
                return
            logger.info("%s is mirrored, %.1f s", step.name, time.monotonic() - started)
            self._steps.settle(path, signature, MIRRORED)
            self._point_to(step.step)
            self._thin_out()
        except (CheckpointError, BucketError, OSError) as error:
            if signature_of(path) is None:
                return  # retention removed the step meanwhile
            if not isinstance(error, CheckpointError):
                raise
            logger.error("%s", error)
            self._steps.settle(path, signature, str(error))

    def _await_others(self, step: StepDirectory) -> None:
        """Let other steps go first while parts of this one are missing, if they can still come."""
        if step.part is None:
            return
        if step.part.nodes != self._settings.nodes:
            raise CheckpointError(
                f"{step.path} is {step.part}, and the run is on {self._settings.nodes} now. To "
                "complete it in the bucket, start checkpoints upload on all machines that have one."
            )
        self._awaiting.add(step.step)

    def _name_of(self, step: int) -> str:
        return self._settings.branch.name_of(step)

    def _point_to(self, step: int) -> None:
        """Name the newest step in the bucket; it is a hint, so a failure is only noted."""
        if self._settings.node > 0 or step <= self._newest_there:
            return
        self._newest_there = step
        try:
            self._remote.point_to(self._name_of(step))
        except BucketError as error:
            logger.warning("the pointer to the newest step is not written: %s", error)

    def _thin_out(self) -> None:
        """Remove old steps from the bucket, and find out which local ones it need not get."""
        if self._retention is None:
            return
        order = self._order()
        in_use = {*order.wanted, *order.skipped}
        removed: list[int] = []
        if self._settings.node == 0:
            removed = self._retention.thin_out(in_use=in_use)
        else:
            self._retention.steps()
        for step in removed:
            logger.info("%s is removed from the bucket", self._name_of(step))
            self._steps.forget(step)
        found = {step: self._steps.manifest(step) for step in (*in_use, *removed)}
        lacking = {step: manifest for step, manifest in found.items() if manifest is not None}
        self._steps.unwanted |= self._retention.unwanted(lacking)

    def _must_stop_copying(self) -> bool:
        """Whether to stop before the next object: at once, or where a step fills in a pause."""
        if self._stopping or not self._filling_in:
            return self._stopping
        return self._draining or bool(self._order().wanted)

    def _wait_after(self, error: Exception) -> None:
        if self._stopping:
            return
        self._failures += 1
        refused = is_refusal(error)
        longest = self._settings.longest_wait_seconds
        wait = wait_seconds(self._failures, refused=refused, longest=longest)
        self._trouble = f"{BLOCKED}{error}" if refused else str(error)
        logger.warning("%s; next attempt in %.0f s", self._trouble, wait)
        self._wait(wait)

    def _wait_to_retry(self, seconds: float) -> None:
        """Wait before a request is sent again, in the thread that sends it.

        Raises:
            BucketError: It is not to be sent again.
        """
        if not self._wait(seconds):
            raise BucketError(f"{self._trouble}; it is not tried again, since the mirror ends")

    def _wait(self, seconds: float) -> bool:
        """Wait, and meanwhile observe and report; return False once there is nothing to wait for.

        That is so after SIGTERM, or when the queue is to be finished and nothing is left in it: a
        bucket that is down then delays no exit.
        """
        until, observes = time.monotonic() + seconds, current_thread() is main_thread()
        next_report = time.monotonic()
        while True:
            now = time.monotonic()
            if observes:
                self._observe_requests()
                if now >= next_report:
                    self._report()
                    next_report = now + self._settings.scan_seconds
            if self._stopping:
                return False
            copies = self._copying is not None and not self._filling_in
            if self._draining and not copies and not self._order().wanted:
                return False
            if now >= until:
                return True
            time.sleep(min(POLL_SECONDS, self._settings.scan_seconds, until - now))

    def _note_fault(self, text: str) -> None:
        """Keep what failed for the next status; a refusal stays what it is until it is over."""
        if not (self._trouble or "").startswith(BLOCKED):
            self._trouble = text

    def _on_progress(self, done_bytes: int, total_bytes: int) -> None:
        self._observe_requests()
        if done_bytes > self._status.done_bytes:
            self._trouble = None
        self._report(done_bytes=done_bytes, total_bytes=total_bytes)

    def _report(self, **changes: object) -> None:
        """Write the status when it has changed, or when the file is old or gone."""
        outcomes, order = self._steps.outcomes(), self._order()
        changes |= {
            "mirrored": tuple(step for step, outcome in outcomes.items() if outcome == MIRRORED),
            "failed": {step: outcome for step, outcome in outcomes.items() if outcome != MIRRORED},
            "waiting": order.wanted,
            "skipped": order.skipped,
            "unwanted": tuple(sorted(self._steps.unwanted)),
            "last_error": self._trouble,
        }
        status = self._status.model_copy(update=changes)
        now = time.time()
        fresh = self._files.status.exists() and now - status.heartbeat < HEARTBEAT_SECONDS
        if status == self._status and fresh:
            return
        self._status = status.model_copy(update={"heartbeat": now})
        try:
            write_json_atomic(self._files.status, self._status.model_dump(mode="json"))
        except OSError as error:  # a full disk: copying on is what lets retention free some
            logger.warning("%s cannot be written: %s", self._files.status, error)

    def _on_terminate(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopping = True
        signal.setitimer(signal.ITIMER_REAL, STOP_SECONDS)

    def _on_deadline(self, _signal: int, _frame: FrameType | None) -> None:
        """Exit at once: an object on its way is unmarked, so nothing is taken for whole."""
        after = f"{self._settings.drain_seconds:.0f} s after training"
        when = "by a signal" if self._stopping else after
        self._trouble = f"ended {when}, with steps to copy"
        try:
            logger.error("%s: %s", self._trouble, self._status.waiting)
            self._report()
        finally:
            os._exit(1)
