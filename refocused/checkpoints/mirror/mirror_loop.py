"""The main loop of the mirror process: find new checkpoints, copy them, retry after failures."""

import contextlib
import dataclasses
import logging
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import current_thread, main_thread
from types import MappingProxyType

from refocused.bucket.open_bucket import open_bucket
from refocused.bucket.retry import Retry
from refocused.checkpoints.mirror.copies import CheckpointCopier, marker_of
from refocused.checkpoints.mirror.lease import Lease
from refocused.checkpoints.mirror.mirror import BLOCKED, MirrorSettings, MirrorStatus
from refocused.checkpoints.mirror.mirror_logs import LogCopier
from refocused.checkpoints.mirror.remote_checkpoints import RemoteCheckpoints, RemoteRetention
from refocused.checkpoints.step import retention
from refocused.checkpoints.step.checkpoint_directory import (
    FIRST_BRANCH,
    Branch,
    checkpoint_paths,
    read_checkpoint,
    step_paths,
)
from refocused.checkpoints.step.checkpoint_manifest import COMMITTED, MANIFEST, CheckpointManifest
from refocused.metrics.history import MIRROR_FILE
from refocused.metrics.jsonl import JsonLines
from refocused.system.atomic_files import write_json_atomic
from refocused.system.errors import BucketError, CheckpointError
from refocused.system.locks import FileLock
from refocused.system.processes import this_process

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 5.0
STOP_SECONDS = 1.0  # after SIGTERM, for requests in flight
MAX_BEHIND = 2
MIRRORED = ""  # the outcome of a successful copy
Signature = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class CopyOrder:
    """The steps that the bucket lacks."""

    to_copy: tuple[int, ...]  # in the order of copying
    # Rolling and emergency saves with newer ones: copied only when idle, not when draining.
    skipped: tuple[int, ...]


def copy_order(
    missing: Mapping[int, CheckpointManifest | None],
    *,
    remote: Mapping[int, CheckpointManifest | None] = MappingProxyType({}),
    copying: int | None = None,
) -> CopyOrder:
    """Order the newest first, since a resume needs it; skip those with two newer ones.

    Args:
        missing: The local checkpoints that the bucket lacks, by step.
        remote: The local checkpoints that it has.
        copying: The step being copied. It stays first: a mirror slower than the saves would
            otherwise never finish one.
    """
    newest = sorted({*remote, *missing}, reverse=True)[:MAX_BEHIND]
    always = {*newest, copying, retention.best_of({**remote, **missing})}
    skipped = [
        step
        for step in sorted(missing, reverse=True)
        if step not in always and not retention.save_reasons(missing[step]) & retention.ALWAYS_KEPT
    ]
    to_copy = sorted(set(missing) - set(skipped), key=lambda step: (step != copying, -step))
    return CopyOrder(tuple(to_copy), tuple(skipped))


class LocalCheckpoint:
    """A local checkpoint; one that is saved again is another."""

    def __init__(self, path: Path) -> None:
        self.manifest: CheckpointManifest | None = None  # None: unusable
        self.outcome: str | None = None  # `MIRRORED`, or why it cannot be copied
        with contextlib.suppress(CheckpointError):
            self.manifest = read_checkpoint(path).manifest


class LocalCheckpoints:
    """The local checkpoints of a branch, and the outcome of copying each."""

    def __init__(self, folder: Path, branch: Branch = FIRST_BRANCH) -> None:
        self._folder = folder
        self._branch = branch
        self._known: dict[tuple[Path, Signature], LocalCheckpoint] = {}
        self.unwanted: frozenset[int] = frozenset()

    def look(self) -> dict[int, LocalCheckpoint]:
        """Return the committed checkpoints by step."""
        steps = {}
        for step, path in step_paths(self._folder, self._branch).items():
            if (signature := signature_of(path)) is not None:
                if (path, signature) not in self._known:  # threads of an upload look, too
                    self._known.setdefault((path, signature), LocalCheckpoint(path))
                steps[step] = self._known[path, signature]
        return steps

    def order(self, *, copying: int | None) -> CopyOrder:
        """Return the steps that are not mirrored, failed or unwanted."""
        missing, remote = {}, {}
        for step, local in self.look().items():
            if local.outcome is None and step not in self.unwanted:
                missing[step] = local.manifest
            elif local.outcome == MIRRORED:
                remote[step] = local.manifest
        return copy_order(missing, remote=remote, copying=copying)


def signature_of(path: Path) -> Signature | None:
    """Return the modification times (ns) of manifest and marker; None if there is none."""
    try:
        return (path / MANIFEST).stat().st_mtime_ns, (path / COMMITTED).stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return None


def mirror(argument: str) -> None:
    """Mirror a run in this process; the argument is MirrorSettings as JSON."""
    settings = MirrorSettings.model_validate_json(argument)
    logger.info("mirror %d of %s to %s", os.getpid(), settings.run, settings.bucket)
    MirrorLoop(settings).run()
    logger.info("mirror %d finished", os.getpid())


class MirrorLoop:
    """Mirrors a run until training exits or a drain is requested, then finishes its queue."""

    def __init__(self, settings: MirrorSettings) -> None:
        self._settings, self._branch = settings, settings.branch
        self._files = settings.files
        self._stopping = False  # a plain flag: an Event's lock is not safe in a signal handler
        self._draining = False
        self._steps = LocalCheckpoints(self._files.checkpoints, settings.branch)
        self._awaiting: set[int] = set()  # steps that wait for parts of other machines
        self._other_branches: dict[str, bool] = {}  # their local checkpoints: whether mirrored
        self._copying: int | None = None
        self._copies_skipped = False  # a step that newer ones replace
        self._newest_remote = -1
        self._failures = 0
        self._last_error: str | None = None
        self._bucket_checked = False
        self._status = MirrorStatus(
            bucket=settings.bucket, prefix=settings.prefix, process=this_process(), heartbeat=0.0
        )

        def wait_to_retry(seconds: float) -> None:  # in the thread that retries a request
            if not self._wait(seconds):
                raise BucketError(f"{self._last_error}; not retried, since the mirror exits")

        def keep_error(text: str) -> None:  # for the next status, unless all requests are refused
            if not (self._last_error or "").startswith(BLOCKED):
                self._last_error = text

        retry = Retry(sleep=wait_to_retry, report=keep_error)
        bucket = open_bucket(settings.bucket, settings.credentials, retry=retry)
        self._remote = RemoteCheckpoints(bucket, settings.prefix)
        self._logs, self._lease = LogCopier(bucket, settings), None
        if settings.lease is not None:
            training = settings.training
            self._lease = Lease(bucket, settings.prefix, token=settings.lease, training=training)

        def stops() -> bool:  # to start no further upload
            if self._stopping or (self._lease is not None and not self._lease.held):  # it slept
                return True
            return self._copies_skipped and (self._draining or bool(self._order().to_copy))

        def report(done_bytes: int, total_bytes: int) -> None:
            self._observe_requests()
            if self._may_write():
                self._logs.copy()
            if done_bytes > self._status.done_bytes:
                self._last_error = None
            self._report(done_bytes=done_bytes, total_bytes=total_bytes)

        self._copier = CheckpointCopier(
            self._remote, stopping=stops, report=report, threads=settings.threads
        )
        keep, self._retention = settings.keep_remote, None
        if keep is not None:
            self._retention = RemoteRetention(self._remote, self._branch, keep=keep)

    def run(self) -> None:
        """Mirror until stopped, or until the queue is finished or `drain_seconds` are over."""

        def stop(*_: object) -> None:
            self._stopping = True
            signal.setitimer(signal.ITIMER_REAL, STOP_SECONDS)

        def exit_at_once(*_: object) -> None:
            # The checkpoint being copied has no marker, so it counts as incomplete.
            after = f"{self._settings.drain_seconds:.0f} s after training"
            when = "by a signal" if self._stopping else after
            self._last_error = f"exited {when}, with steps to copy"
            try:
                logger.error("%s: %s", self._last_error, self._status.waiting)
                self._report()
            finally:
                os._exit(1)

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGALRM, exit_at_once)
        lock = FileLock(self._files.lock)
        while not lock.acquire():  # an earlier mirror may be finishing its queue
            time.sleep(POLL_SECONDS)
            if self._stopping or not self._settings.training.alive:
                return
        while not self._stopping:
            self._observe_requests()
            order = self._order()
            if self._draining and not order.to_copy:
                if self._lease is not None and self._settings.node == 0:
                    self._lease.release()
                token = self._files.drain.read_text() if self._files.drain.exists() else None
                self._report(drained=token)
                has_logs = self._lease is None or self._finish_logs()
                left = self._status.failed or self._order().to_copy  # saved by a later start
                self._report(complete=has_logs and not left)
                return
            if not self._may_write():
                self._wait(self._settings.scan_seconds)
            elif order.to_copy:
                self._attempt(self._next(order.to_copy))
            elif order.skipped:
                self._copies_skipped = True
                self._attempt(self._next(order.skipped))
                self._copies_skipped = False
            else:
                self._attempt(None)
                self._wait(self._settings.scan_seconds)

    def _finish_logs(self) -> bool:
        """Copy the last lines of the logs, which training writes until it ends; return success.

        Failures are repeated for another `drain_seconds`, or until the run is started again: the
        mirror of that start removes the status, waits for the end of this one, and copies them.
        """
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        failures, due, ends = 0, 0.0, math.inf
        retry = Retry(max_wait_s=self._settings.longest_wait_seconds)
        while not self._stopping and (now := time.monotonic()) < ends:
            if self._settings.training.alive:
                self._logs.copy()
            elif now >= due:
                ends, failures = min(ends, now + self._settings.drain_seconds), failures + 1
                if (error := self._logs.copy(at_once=True)) is None:
                    self._last_error = None
                    return True
                self._last_error = f"the last log lines: {error}"
                logger.warning("not in the bucket: %s", self._last_error)
                due = now + retry.wait_s(failures)
            if not self._files.status.exists():
                return False
            self._report()
            time.sleep(POLL_SECONDS)
        return False

    def _may_write(self) -> bool:
        """Return whether the run's lease allows uploads; node 0 renews it after training."""
        lease, settings = self._lease, self._settings
        if lease is None:
            return True
        try:
            if lease.is_due:
                lease.renew(writes=settings.node == 0 and not settings.training.alive)
            if lease.released:  # by node 0, once all was there: only logs are left
                return True
            if not lease.held:
                self._last_error = f"no upload without {lease.url}, held by {lease.other}"
                self._stopping = self._draining and lease.taken_by is not None
        except BucketError as error:
            if not lease.held:
                self._wait_after(error)
        return lease.held

    def _observe_requests(self) -> None:
        """Check whether to finish the queue and exit; start the deadline when that changes."""
        draining = self._files.drain.exists() or not self._settings.training.alive
        if draining != self._draining and not self._stopping:
            self._draining = draining
            limit = max(self._settings.drain_seconds, 0.001) if draining else 0.0
            signal.setitimer(signal.ITIMER_REAL, limit)

    def _order(self) -> CopyOrder:
        return self._steps.order(copying=None if self._copies_skipped else self._copying)

    def _next(self, steps: Sequence[int]) -> int:
        """Return the first step that waits for no other machine, else wait and retry."""
        for step in steps:
            if step not in self._awaiting:
                return step
        self._wait(self._settings.scan_seconds)
        self._awaiting.clear()
        return steps[0]

    def _attempt(self, step: int | None) -> None:
        """Copy a step, after a first check that the bucket is writable; wait after a failure."""
        self._copying = step
        self._report()
        self._logs.copy()
        try:
            if not self._bucket_checked:
                self._remote.write_readme()
                self._prune()
                self._bucket_checked = True
            elif step is not None:
                self._copy(step)
            else:  # find the local checkpoints of other branches that the bucket has
                for name, path in checkpoint_paths(self._files.checkpoints).items():
                    if self._branch.step_of(name) is None and name not in self._other_branches:
                        is_mirrored = False
                        with contextlib.suppress(CheckpointError):  # corrupt, or removed meanwhile
                            is_mirrored = self._remote.marker(name) == marker_of(
                                read_checkpoint(path)
                            )
                        self._other_branches[name] = is_mirrored
        except BucketError as error:
            self._wait_after(error)
        except OSError as error:
            failure = BucketError(error)
            failure.__cause__ = error
            self._wait_after(failure)
        else:
            self._copying, self._failures, self._last_error = None, 0, None
            self._report(done_bytes=0, total_bytes=0)

    def _copy(self, step: int) -> None:
        path, started = self._files.checkpoints / self._branch.name_of(step), time.monotonic()
        if (local := self._steps.look().get(step)) is None:
            return
        try:
            checkpoint = read_checkpoint(path)
            if not self._copier.copy(checkpoint):
                if checkpoint.part is None:
                    return
                if checkpoint.part.nodes != self._settings.nodes:
                    raise CheckpointError(
                        f"{checkpoint.path} is {checkpoint.part}, but the run now has "
                        f"{self._settings.nodes} machines. To complete it in the bucket, run "
                        "`checkpoints upload` on all machines with a part."
                    )
                self._awaiting.add(step)  # copy others first while parts of it are missing
                return
            seconds = time.monotonic() - started
            logger.info("%s mirrored in %.1f s", checkpoint.name, seconds)
            if self._settings.node == 0:  # for the summary's curve; a full disk loses the line
                file = self._settings.run / MIRROR_FILE
                figures = {"seconds": seconds, "bytes": checkpoint.manifest.total_bytes}
                with contextlib.suppress(OSError), contextlib.closing(JsonLines(file)) as lines:
                    lines.write({"kind": "mirrored", "step": step, **figures})
            local.outcome = MIRRORED
            if self._settings.node == 0 and step > self._newest_remote:
                self._newest_remote = step
                try:
                    self._remote.write_pointer(self._branch.name_of(step))
                except BucketError as error:  # it is only a hint
                    logger.warning("cannot write the pointer to the newest step: %s", error)
            self._prune()
        except (CheckpointError, BucketError, OSError) as error:
            if signature_of(path) is None:
                return  # retention removed the step meanwhile
            if not isinstance(error, CheckpointError):
                raise
            logger.error("%s", error)
            local.outcome = str(error)

    def _prune(self) -> None:
        """Remove old checkpoints from the bucket, and update which local ones it need not have."""
        if self._retention is None:
            return
        order = self._order()
        in_use = {*order.to_copy, *order.skipped}
        removed: list[int] = []
        if self._settings.node == 0:
            removed = self._retention.prune(in_use=in_use)
        else:
            self._retention.states()
        local = self._steps.look()
        for step in removed:
            logger.info("%s removed from the bucket", self._branch.name_of(step))
            if step in local:
                local[step].outcome = None
        missing = {s: local[s].manifest for s in {*in_use, *removed} & {*local}}
        usable = {step: manifest for step, manifest in missing.items() if manifest is not None}
        self._steps.unwanted |= self._retention.unwanted(usable)

    def _wait_after(self, error: BucketError) -> None:
        self._copying = None
        if self._stopping:
            return
        self._failures += 1
        longest = self._settings.longest_wait_seconds
        wait = Retry(max_wait_s=longest).wait_s(self._failures) if error.transient else longest
        self._last_error = str(error) if error.transient else f"{BLOCKED}{error}"
        logger.warning("%s; next attempt in %.0f s", self._last_error, wait)
        self._wait(wait)

    def _wait(self, seconds: float) -> bool:
        """Wait, and meanwhile observe requests and report; return False to exit now.

        That is after SIGTERM, or if the mirror is draining and its queue is empty, so that an
        unreachable bucket does not delay the exit.
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
            copies = self._copying is not None and not self._copies_skipped
            if self._draining and not copies and not self._order().to_copy:
                return False
            if now >= until:
                return True
            time.sleep(min(POLL_SECONDS, self._settings.scan_seconds, until - now))

    def _report(self, **changes: object) -> None:
        """Write the status if it has changed, or if the file is old or missing."""
        outcomes = {step: local.outcome for step, local in self._steps.look().items()}
        order, others = self._order(), self._other_branches
        changes |= {
            "mirrored": tuple(step for step, outcome in outcomes.items() if outcome == MIRRORED),
            "failed": {step: outcome for step, outcome in outcomes.items() if outcome},
            "waiting": order.to_copy,
            "skipped": order.skipped,
            "unwanted": tuple(sorted(self._steps.unwanted)),
            "of_other_branches": tuple(name for name, is_there in others.items() if is_there),
            "last_error": self._last_error,
        }
        status = self._status.model_copy(update=changes)
        now = time.time()
        fresh = self._files.status.exists() and now - status.heartbeat < HEARTBEAT_SECONDS
        if status == self._status and fresh:
            return
        self._status = status.model_copy(update={"heartbeat": now})
        try:
            write_json_atomic(self._files.status, self._status.model_dump(mode="json"))
        except OSError as error:  # on a full disk, go on: retention frees what is mirrored
            logger.warning("cannot write %s: %s", self._files.status, error)
