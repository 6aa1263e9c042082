"""Fetch planned shards in the background: one coordinator thread and several workers."""

import contextlib
import itertools
import logging
import math
import os
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence

from refocused.bucket.bucket import Bucket
from refocused.bucket.retry import Retry
from refocused.data.cache.fetch_plan import FetchQueue
from refocused.data.cache.local_shards import FetcherFiles, Heartbeat, LocalShards, remove_local
from refocused.data.cache.shard_download import ShardDownload
from refocused.system.errors import BucketError, RefocusedError, ShardError

POLL_SECONDS = 0.2
HEARTBEAT_SECONDS = 1.0
PROOFS = 2  # that an object is wrong, before its shard is given up
RETRY = Retry()  # its waits: trouble that may pass is retried without end
CLOSE_SECONDS = 10.0
# Split the first shards of the plan into ranges over all workers, so that training starts early.
# Download the others whole, several at once (fewer requests), and split again when fewer shards
# than workers are left.
SPLIT_FIRST_SHARDS = 4

_log = logging.getLogger(__name__)


class Fetcher:
    """Fetches the shards of a queue, in its order and within the byte limit.

    It fetches only while it holds the folder's lock, and waits while another process does. Without
    `limit_bytes`, shards may use the disk up to 95 %. `peaks` are the bytes that each shard takes
    at most while it is fetched.

    Trouble of the bucket, the network or the disk is retried without end: how long a rank waits for
    a shard is the rank's decision (`data.fetch_timeout_s`). Only a shard that is proven wrong is
    given up, which concerns the ranks that need it; the others are fetched.
    """

    def __init__(
        self,
        buckets: Mapping[str, Bucket],
        local: LocalShards,
        files: FetcherFiles,
        queue: FetchQueue,
        *,
        limit_bytes: int | None,
        peaks: Sequence[int],
        threads: int,
    ) -> None:
        self._buckets = buckets
        self._local = local
        self._files = files
        self._queue = queue
        self._changed = queue.changed
        self._limit_bytes = limit_bytes
        self._peaks = peaks
        self._workers = threads
        self._folder = local.folder / "incoming" / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._heartbeat_lock, self._beats = threading.Lock(), itertools.count()
        self._beaten = -HEARTBEAT_SECONDS
        self._shared: dict[int, ShardDownload] = {}
        self._starting = False
        self._failures, self._proofs = Counter[int](), Counter[int]()  # in a row, by shard
        self._fetched = 0
        self._stopped = False
        self.leads = False  # whether it holds the folder's lock
        self.failure: RefocusedError | None = None  # of all shards: a defect
        self.troubles: dict[int, RefocusedError] = {}  # by shard: its last failure
        self.given_up: set[int] = set()
        jobs = [("shard coordinator", self._coordinate), *[("shard fetch", self._work)] * threads]
        self._threads = [threading.Thread(target=job, name=name, daemon=True) for name, job in jobs]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads, release the lock, and remove unfinished files.

        A download that does not end within 10 s cannot publish, because its folder is removed.
        """
        with self._changed:
            self._stopped = True
            self._cancel(BucketError(f"{self._local.folder}: closed before this arrived."))
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        shutil.rmtree(self._folder, ignore_errors=True)
        self._files.lock.release()
        self.leads = False

    def failure_of(self, index: int) -> RefocusedError | None:
        """Return why a shard will not come, or None if it may."""
        with self._changed:
            return self.failure or (self.troubles[index] if index in self.given_up else None)

    def _coordinate(self) -> None:
        try:
            self._lead()
            while not self._stopped:
                self.collect_requests()
                self._beat_if_due()
                self._wait(POLL_SECONDS)
        except Exception as error:  # a thread's edge: the cache raises it
            self._fail(error)

    def _lead(self) -> None:
        """Acquire the lock, remove remains of other fetchers, and list the local shards."""
        warned = False
        while not self._stopped and not self._files.lock.acquire():
            if not warned:
                _log.warning(
                    "%s: another process fetches into this folder; using its shards",
                    self._local.folder,
                )
            warned = True
            self._wait(POLL_SECONDS)
        if self._stopped:
            return
        self._beat_if_due()  # a network disk may take long for what follows
        self._local.remove_leftovers()
        self._folder.mkdir(parents=True)
        present = self._local.present()
        with self._changed:
            self._queue.present |= present
            self.leads = True
            self._changed.notify_all()

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)

    def collect_requests(self) -> None:
        """Read which shards the ranks of this machine are waiting for."""
        requests = self._files.requests(now=time.monotonic())
        with self._changed:
            queue = self._queue
            queue.request(requests)
            for index in queue.present & queue.requested:
                if self._local.row(index) is None:  # removed by another process
                    queue.present.discard(index)
            self._changed.notify_all()

    def _beat_if_due(self) -> None:
        if time.monotonic() - self._beaten >= HEARTBEAT_SECONDS:
            self._beat()
            self._beaten = time.monotonic()

    def _beat(self) -> None:
        with self._changed:
            names = tuple(self._local.path(index).name for index in self._queue.wanted)
            incoming = sum(map(self._peaks.__getitem__, self._queue.busy))
        received = 0  # changes when bytes arrive, also within a sparse file
        for path in self._folder.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # finished since it was listed
                status = path.stat()
                received += status.st_size + status.st_blocks
        heartbeat = Heartbeat(
            pid=os.getpid(),
            beats=next(self._beats),
            progress=self._fetched + received,
            error=str(self.failure) if self.failure else None,
            troubles={str(index): str(error) for index, error in self.troubles.copy().items()},
            given_up=tuple(self.given_up),
            wanted=names,
            incoming=incoming,
        )
        # On a full disk none can be written; ranks that wait then time out.
        with self._heartbeat_lock, contextlib.suppress(OSError):
            self._files.beat(heartbeat)

    def _work(self) -> None:
        while (task := self._next_task()) is not None:
            if isinstance(task, ShardDownload):
                task.help()
            else:
                self._fetch(task)

    def _next_task(self) -> ShardDownload | int | None:
        """Wait for a shard to fetch, or a download to help with; None at the end."""
        with self._changed:
            while not self._stopped and self.failure is None:
                shared = {
                    index: download for index, download in self._shared.items() if download.jobs
                }
                index = None
                if self.leads and not self._starting:
                    index = self._queue.following(now=time.monotonic(), shared=shared)
                if index is not None and index not in shared:
                    try:
                        has_room = self._make_room(index)
                    except OSError as error:
                        self._retry(index, error)
                        has_room = False
                    if not has_room:  # until what is under way has ended, help with that
                        index = next(iter(shared), None)
                if index in shared:
                    return shared[index]
                if index is not None:
                    self._queue.busy.add(index)
                    self._starting = True  # until its jobs are known, no other shard is started
                    return index
                self._changed.wait(HEARTBEAT_SECONDS)  # the coordinator notifies every 0.2 s
        return None

    def _fetch(self, index: int) -> None:
        bucket = self._buckets[self._local.source(index)]
        download = ShardDownload(bucket, self._local, index, self._folder, changed=self._changed)
        try:
            self._start(download)
            try:
                download.run()
            finally:
                with self._changed:
                    del self._shared[index]
            download.finish()
        except (BucketError, ShardError, OSError) as error:
            self._retry(index, error)
        except Exception as error:  # a thread's edge: the cache raises it
            self._fail(error)
        else:
            with self._changed:
                self._fetched += 1
                for failures in (self._failures, self._proofs, self.troubles):
                    failures.pop(index, None)
                # An outage, if there was one, is over.
                self._queue.paused_until = dict.fromkeys(self.given_up, math.inf)
                self._queue.busy.discard(index)
                self._queue.present.add(index)
                self._changed.notify_all()

    def _start(self, download: ShardDownload) -> None:
        """Split the download into jobs, and share them with the other workers."""
        try:
            with self._changed:
                queue = self._queue
                first = (*queue.requested, *queue.planned[:SPLIT_FIRST_SHARDS])
                concurrent = 1 if download.index in first else 1 + queue.not_started()
            download.start(ranges=math.ceil(self._workers / concurrent))
            with self._changed:
                self._shared[download.index] = download
        finally:
            with self._changed:
                self._starting = False
                self._changed.notify_all()

    def _make_room(self, index: int) -> bool:
        """Evict what the limit and the disk require; return whether there is room for a shard.

        All that is under way counts with what it takes at most, and so do the files of other data
        sets. These are evicted first, unless a running fetcher needs them. Without room, and with
        nothing under way, the shard's turn comes again after a pause. A requested shard stays until
        its rank has opened it and removes the request: soon, so that is no trouble.
        """
        local, queue, needed = self._local, self._queue, self._peaks[index]
        stored, (kept, incoming) = local.stored(), local.others()
        incoming += needed + sum(map(self._peaks.__getitem__, queue.busy))
        disk = shutil.disk_usage(local.folder)
        missing = incoming - (disk.free - disk.total // 20)  # 5 % of the disk stay free
        if self._limit_bytes is not None:
            missing = max(missing, incoming + sum(stored.values()) - self._limit_bytes)
        present_names = {local.path(shard).name for shard in queue.present | queue.busy}
        for path, size in stored.items():
            if missing > 0 and path.name not in kept | present_names:
                remove_local(path)
                missing -= size
        # The plan and one download always fit, but not what a rank needs besides.
        is_unplanned = index not in {*queue.planned, *queue.pinned}
        for victim in queue.evictable(planned_too=is_unplanned and not queue.busy):
            if missing > 0 and local.path(victim).name not in kept:
                queue.present.discard(victim)
                local.remove(victim)
                missing -= local.bytes(victim)
        if missing > 0 and not queue.busy and not queue.requested & queue.present:
            text = (
                f"{local.manifest.shards[index].name}: {needed:,} bytes are needed below "
                f"{local.folder.parent} for the download and the local form, but "
                f"{max(needed - missing, 0):,} are free. Free some space, set data.cache to "
                "another disk, or change data.disk_limit_gb."
            )
            self._retry(index, BucketError(text))
        return missing <= 0

    def _retry(self, index: int, error: BucketError | ShardError | OSError) -> None:
        if isinstance(error, OSError):
            name, folder = self._local.manifest.shards[index].name, self._local.folder.parent
            text = f"{name}: {error}, while writing it below {folder}. Free some space, or set "
            error = BucketError(f"{text}data.cache to another disk.")
        with self._changed:
            self.troubles[index] = error
            self._failures[index] += 1
            self._proofs[index] += isinstance(error, ShardError)
            pause = RETRY.wait_s(self._failures[index])
            if self._proofs[index] >= PROOFS:
                self.given_up.add(index)
                pause = math.inf
            self._queue.paused_until[index] = time.monotonic() + pause
            self._queue.busy.discard(index)
        if self.failure is None and not self._stopped:
            then = f"Retrying in {pause:.1f} s." if pause < math.inf else "Training stops there."
            _log.warning("%s %s", error, then)

    def _fail(self, error: Exception) -> None:
        """Keep the first failure, and report it to the other processes at once."""
        with self._changed:
            if self._stopped:
                return
            if not isinstance(error, RefocusedError):
                folder = self._local.folder
                error = ShardError(f"The fetcher of {folder} failed: {error!r}. Start again.")
            self.failure = self.failure or error
            self._cancel(self.failure)
        if self.leads:
            self._beat()

    def _cancel(self, reason: RefocusedError) -> None:
        for download in self._shared.values():
            download.cancel(reason)
        self._changed.notify_all()
