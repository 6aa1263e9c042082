"""The background process at work: watches the run's folder and copies what is new, for as long."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from refocused.bucket.google_faults import RefusedRequestError
from refocused.bucket.open import open_bucket
from refocused.checkpoints.atomic import FileLock, write_json_atomic
from refocused.checkpoints.manifest import MANIFEST, CheckpointManifest
from refocused.checkpoints.mirror_copy import StepCopier
from refocused.checkpoints.mirror_queue import CopyOrder, copy_order
from refocused.checkpoints.mirror_status import BLOCKED, MirrorSettings, MirrorStatus
from refocused.checkpoints.remote_retention import RemoteRetention, kept_steps
from refocused.checkpoints.remote_steps import COMMITTED, SUPERSEDED, RemoteSteps
from refocused.checkpoints.step_directory import (
    StepDirectory,
    name_of,
    parse_name,
    read_step,
    step_paths,
)
from refocused.errors import BucketError, CheckpointError
from refocused.process_identity import this_process

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 5.0
FIRST_WAIT_SECONDS = 1.0
MOST_DOUBLINGS = 30
_REFUSALS = (RefusedRequestError, PermissionError, NotADirectoryError, FileExistsError)


def is_refusal(error: BaseException) -> bool:
    """Whether trying again cannot help by itself: no permission, no bucket, no such folder."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, _REFUSALS):
        cause = cause.__cause__
    return cause is not None


def wait_seconds(failures: int, *, refused: bool, longest: float) -> float:
    """How long to wait after so many failures in a row: doubling, or the longest at once."""
    if refused:
        return longest
    doublings = min(failures - 1, MOST_DOUBLINGS)  # a bucket may be down for thousands of attempts
    return min(FIRST_WAIT_SECONDS * 2.0**doublings, longest)


@dataclasses.dataclass(frozen=True, slots=True)
class _Settled:
    """A step that needs nothing more, until its manifest is another file.

    Attributes:
        signature: Of the manifest that was looked at.
        failure: Why it cannot be copied; None: it is in the bucket.
    """

    signature: tuple[int, int]
    failure: str | None


class MirrorLoop:
    """One mirror at work; ends by itself when training does, or when it is asked to."""

    def __init__(self, settings: MirrorSettings) -> None:
        """Open the bucket; nothing is asked of it yet."""
        self._settings = settings
        self._files = settings.files
        self._stopping = False  # a plain flag: an Event's lock is not safe in a signal handler
        self._settled: dict[str, _Settled] = {}
        self._manifests: dict[str, tuple[tuple[int, int], CheckpointManifest | None]] = {}
        self._unwanted: frozenset[int] = frozenset()
        self._awaiting: set[int] = set()
        self._copying: int | None = None
        self._filling_in = False
        self._newest_there: int | None = None
        self._failures = 0
        self._acquainted = False
        self._draining = False
        self._status = MirrorStatus(
            bucket=settings.bucket, prefix=settings.prefix, process=this_process(), heartbeat=0.0
        )
        bucket = open_bucket(
            settings.bucket,
            credentials_file=settings.credentials_file,
            project=settings.project,
        )
        self._remote = RemoteSteps(bucket, settings.prefix)
        self._copier = StepCopier(
            self._remote,
            stopping=self._must_stop_copying,
            report=self._report,
            threads=settings.threads,
        )
        self._retention = (
            RemoteRetention(self._remote, keep=settings.keep_remote)
            if settings.keep_remote is not None
            else None
        )

    def run(self) -> None:
        """Mirror until told to stop, until the queue is finished, or until the time is up."""
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGALRM, self._on_deadline)
        lock = FileLock(self._files.lock)
        while not lock.acquire():  # the mirror of an earlier start may be finishing its queue
            time.sleep(self._settings.scan_seconds)
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
                self._tell(drained=self._token())
                return
            else:
                self._attempt(None)
                time.sleep(self._settings.scan_seconds)

    def _observe_requests(self) -> None:
        """Note whether to finish the queue and end; the clock runs from the first time it is so."""
        draining = self._files.drain.exists() or not self._settings.training.alive
        if draining != self._draining:
            self._draining = draining
            limit = max(self._settings.drain_seconds, 0.001) if draining else 0.0
            signal.setitimer(signal.ITIMER_REAL, limit)

    def _next(self, steps: Sequence[int]) -> int:
        """Take the first step that waits for no other machine; the rest come again in a while."""
        for step in steps:
            if step not in self._awaiting:
                return step
        time.sleep(self._settings.scan_seconds)
        self._awaiting.clear()
        return steps[0]

    def _attempt(self, step: int | None) -> None:
        """Copy one step, or just see that the bucket can be written; wait when that fails."""
        self._copying = step
        self._tell()
        try:
            if not self._acquainted:
                self._make_acquaintance()
            elif step is not None:
                self._copy(self._files.checkpoints / name_of(step))
        except (BucketError, OSError) as error:
            self._copying = None
            self._wait_after(error)
        else:
            self._copying = None
            self._failures = 0
            self._tell(last_error=None, done_bytes=0, total_bytes=0)

    def _make_acquaintance(self) -> None:
        """See that the bucket can be written, and what it has."""
        self._remote.introduce()
        there = [
            step
            for step, objects in self._remote.scan().items()
            if COMMITTED in objects and SUPERSEDED not in objects
        ]
        self._point_to(max(there, default=None))
        self._thin_out()
        self._acquainted = True

    def _point_to(self, step: int | None) -> None:
        """Name the newest step in the bucket; it is a hint, so a failure is only noted."""
        known = self._newest_there
        if self._settings.node > 0 or step is None or (known is not None and step <= known):
            return
        self._newest_there = step
        try:
            self._remote.point_to(name_of(step))
        except BucketError as error:
            logger.warning("the pointer to the newest step is not written: %s", error)

    def _thin_out(self) -> None:
        """Remove old steps from the bucket, and find out which local ones it need not get."""
        if self._retention is None:
            return
        order = self._order()
        in_use = {*order.wanted, *order.skipped}
        removed = self._retention.thin_out(in_use=in_use) if self._settings.node == 0 else []
        for step in removed:
            logger.info("%s is removed from the bucket", name_of(step))
            self._settled.pop(name_of(step), None)
        lacking = {
            step: manifest
            for step in (*order.wanted, *order.skipped, *removed)
            if (manifest := self._manifest(self._files.checkpoints / name_of(step))) is not None
        }
        self._unwanted |= self._retention.unwanted(lacking)

    def _must_stop_copying(self) -> bool:
        """Whether to stop before the next object: at once, or where a step fills in a pause."""
        if self._stopping or not self._filling_in:
            return self._stopping
        return self._draining or bool(self._order().wanted)

    def _copy(self, path: Path) -> None:
        signature = _signature(path)
        started = time.monotonic()
        try:
            if signature is None:
                return
            step = read_step(path)
            if not self._copier.copy(step):
                self._await_others(step)
            else:
                logger.info("%s is mirrored, %.1f s", path.name, time.monotonic() - started)
                self._settled[path.name] = _Settled(signature, None)
                self._point_to(_step(path))
                self._thin_out()
        except (CheckpointError, BucketError, OSError) as error:
            if _signature(path) is None:
                return  # retention removed the step meanwhile
            if not isinstance(error, CheckpointError):
                raise
            logger.error("%s", error)
            self._settled[path.name] = _Settled(signature or (0, 0), str(error))

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

    def _wait_after(self, error: Exception) -> None:
        self._failures += 1
        refused = is_refusal(error)
        longest = self._settings.longest_wait_seconds
        wait = wait_seconds(self._failures, refused=refused, longest=longest)
        text = f"{BLOCKED}{error}" if refused else str(error)
        logger.warning("%s; next attempt in %.0f s", text, wait)
        until = time.monotonic() + wait
        while (left := until - time.monotonic()) > 0 and not self._stopping:
            self._observe_requests()
            if self._draining and not self._order().wanted:
                return  # a bucket that is down keeps nobody waiting when there is nothing to send
            self._tell(last_error=text)
            time.sleep(min(self._settings.scan_seconds, left))

    def _report(self, done_bytes: int, total_bytes: int) -> None:
        self._observe_requests()
        self._tell(done_bytes=done_bytes, total_bytes=total_bytes)

    def _order(self) -> CopyOrder:
        """The committed steps that are neither mirrored nor hopeless nor unwanted."""
        paths = {
            _step(path): path
            for path in step_paths(self._files.checkpoints)
            if _signature(path) is not None
        }
        manifests = {step: self._manifest(path) for step, path in paths.items()}
        known = kept_steps(manifests, whole=set(manifests), in_use=())
        verdicts = {step: self._verdict(path) for step, path in paths.items()}
        return copy_order(
            [
                step
                for step in known
                if verdicts[step.step] is None and step.step not in self._unwanted
            ],
            there=[step for step, was in verdicts.items() if was and was.failure is None],
            copying=None if self._filling_in else self._copying,
        )

    def _manifest(self, path: Path) -> CheckpointManifest | None:
        """Return a step's manifest, read once; None: it cannot be used, or the step is gone."""
        signature, known = _signature(path), self._manifests.get(path.name)
        if signature is None:
            return None
        if known is None or known[0] != signature:
            try:
                known = signature, read_step(path).manifest
            except CheckpointError:
                known = signature, None
            self._manifests[path.name] = known
        return known[1]

    def _verdict(self, path: Path) -> _Settled | None:
        """What is settled about a step; None once its manifest is another file."""
        settled = self._settled.get(path.name)
        return settled if settled and settled.signature == _signature(path) else None

    def _tell(self, **changes: object) -> None:
        """Write the status when it says something new, or when the last word is old or gone."""
        known = {path: self._verdict(path) for path in step_paths(self._files.checkpoints)}
        steps = {_step(path): settled for path, settled in known.items() if settled is not None}
        changes["mirrored"] = tuple(step for step, was in steps.items() if was.failure is None)
        changes["failed"] = {step: was.failure for step, was in steps.items() if was.failure}
        order = self._order()
        changes["waiting"], changes["skipped"] = order.wanted, order.skipped
        changes["unwanted"] = tuple(sorted(self._unwanted))
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

    def _token(self) -> str | None:
        return self._files.drain.read_text() if self._files.drain.exists() else None

    def _on_terminate(self, _signal: int, _frame: FrameType | None) -> None:
        self._stopping = True

    def _on_deadline(self, _signal: int, _frame: FrameType | None) -> None:
        """Leave at once: an object on its way is unmarked, so nothing is taken for whole."""
        text = f"ended {self._settings.drain_seconds:.0f} s after training, with steps to copy"
        try:
            logger.error("%s: %s", text, self._status.waiting)
            self._tell(last_error=text)
        finally:
            os._exit(1)


def _signature(path: Path) -> tuple[int, int] | None:
    """What tells a manifest from a later one of the same name; None when there is none."""
    try:
        found = (path / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_ino, found.st_mtime_ns


def _step(path: Path) -> int:
    step = parse_name(path.name)
    assert step is not None  # step_paths yields no other names
    return step
