"""The local shards of a run: planned, fetched ahead of use, verified, and evicted after it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.bucket.retry import Retry
from refocused.config.data import DataConfig
from refocused.data.cache.fetch_plan import FetchQueue
from refocused.data.cache.local_shards import LocalShards, TokenFile, check_vocabulary
from refocused.data.cache.shard_download import ShardDownload
from refocused.data.manifest.shard_manifest import Manifest, is_skipped
from refocused.system.errors import BucketError, RefocusedError, ShardError

POLL_SECONDS = 0.05
PAUSE_SECONDS = 0.2  # until a shard that another process fetches is looked at again
TAKEOVER_SECONDS = 2.0  # until a rank that does not fetch takes a shard that nobody fetches
PROOFS = 2  # that an object is wrong, before its shard is given up
RETRY = Retry()  # its waits: trouble that may pass is retried without end
CLOSE_SECONDS = 10.0
MAX_OPEN_FILES = 512  # the default limit of a process is 1,024
# Split the first shards of the plan into ranges over all workers, so that training starts early.
# Download the others whole, several at once (fewer requests), and split again when fewer shards
# than workers are left.
SPLIT_FIRST_SHARDS = 4

_log = logging.getLogger(__name__)


def threads_for(buckets: Iterable[Bucket], threads: int, *, cores: int) -> int:
    """Limit the number of fetch threads to the cores if all sources are folders.

    Threads that read a store mostly wait for it; those that read a folder inflate and convert.
    Eight of them on two cores took 1.15 times the CPU time of two.
    """
    are_folders = all(isinstance(bucket, DirectoryBucket) for bucket in buckets)
    return min(threads, cores) if are_folders else threads


class ShardCache:
    """The local shards of one data set on one machine; safe to share between threads.

    Each rank has one. That of local rank 0 fetches what is planned. The others open its shards, and
    fetch one only if nobody else does, such as one that it has given up. A shard is fetched by one
    process at a time, and not evicted while a process plans or awaits it, also of another run.

    Trouble of the bucket, the network or the disk is retried without end: how long a rank waits for
    a shard is the rank's decision (`data.fetch_timeout_s`). Only a shard that is proven wrong is
    given up, which concerns the ranks that need it; the others are fetched. Without
    `data.disk_limit_gb`, shards may use the disk up to 95 %.

    Args:
        buckets: By the source of a mixture; the only one without a mixture has the name "".
        manifest: The shards; every index below refers to them.
        folder: `data.cache`, which all data sets share.
        vocabulary: Size of the model's vocabulary.
        fetches: Whether this cache fetches what is planned.

    Raises:
        ShardError: The manifest has an id outside the vocabulary, or the folder cannot be created.
    """

    def __init__(
        self,
        buckets: Mapping[str, Bucket],
        manifest: Manifest,
        folder: Path,
        *,
        data: DataConfig,
        vocabulary: int,
        fetches: bool,
    ) -> None:
        for shard in manifest.shards:
            if not is_skipped(shard, data):
                for file in shard.files:
                    check_vocabulary(file, file.max_id or 0, vocabulary=vocabulary)
        self.names = [shard.file_names for shard in manifest.shards]
        self.vocabulary = vocabulary
        self._fetches = fetches
        self._timeout_seconds = data.fetch_timeout_s
        self._limit = math.inf if data.disk_limit_gb is None else int(data.disk_limit_gb * 1e9)
        self._local = LocalShards(
            folder, buckets, manifest=manifest, data=data, vocabulary=vocabulary
        )
        self.local_bytes = self._local.bytes.__getitem__  # of a shard, whether or not it is local
        self._planned: Sequence[int] = ()
        self._pinned: set[int] = set()
        self._queue = FetchQueue()
        self._changed = self._queue.changed
        self._open: dict[int, TokenFile] = {}
        cores = len(os.sched_getaffinity(0))
        self._workers = threads_for(buckets.values(), data.fetch_threads, cores=cores)
        self._threads: list[threading.Thread] = []
        self._shared: dict[int, ShardDownload] = {}  # downloads with which other workers can help
        self._starting = self._stopped = False
        self._failures, self._proofs = Counter[int](), Counter[int]()  # in a row, by shard
        self._failure: RefocusedError | None = None  # of all shards: a defect
        self._troubles: dict[int, RefocusedError] = {}  # by shard: its last failure
        self._given_up: set[int] = set()

    def __enter__(self) -> ShardCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def room_for_training(self, pinned: Iterable[int]) -> int | None:
        """Return the bytes of the limit beside pinned shards and a download; None: no limit."""
        if self._limit == math.inf:
            return None
        local = self._local
        on_its_way = max(map(int.__sub__, local.peaks, local.bytes))
        return int(self._limit) - on_its_way - sum(map(self.local_bytes, pinned))

    def plan(self, needed: Sequence[int]) -> None:
        """Replace the plan: the shards to fetch and keep local, in order of use.

        Other shards are closed, and evicted if the limit requires it, oldest plan first. Raises
        `ShardError` if planned and pinned shards do not fit into `data.disk_limit_gb`.
        """
        with self._changed:
            self._set_plan(needed, self._pinned)

    def pin(self, indices: Iterable[int]) -> None:
        """Keep shards local permanently, in addition to any plan; raises as `plan`."""
        with self._changed:
            self._set_plan(self._planned, {*self._pinned, *indices})

    def _set_plan(self, planned: Sequence[int], pinned: set[int]) -> None:
        local, queue = self._local, self._queue
        kept, before = {*planned, *pinned}, {*self._planned, *self._pinned}
        needed = sum(map(self.local_bytes, kept))
        # Besides them, one is on its way.
        needed += max((local.peaks[i] - local.bytes[i] for i in kept), default=0)
        # Without a limit, the free space of the disk is checked before each fetch.
        if needed > self._limit:
            raise ShardError(
                f"{len(kept)} shards are needed at once and take {needed:,} bytes, but "
                f"data.disk_limit_gb allows {self._limit:,}. Raise data.disk_limit_gb to "
                f"{needed / 1e9:.6f} or more, or lower data.block_shards or "
                "data.fetch_ahead_shards."
            )
        self._planned, self._pinned = planned, pinned
        self._open = {index: file for index, file in self._open.items() if index in kept}
        if not self._fetches:
            return
        for index in kept - before:
            local.locks.acquire(local.lock("use", index), shared=True, wait=True)
        for index in before - kept - queue.requested:
            local.locks.release(local.lock("use", index))
        queue.plan(planned, pinned)
        self._start_threads()

    def open(self, index: int) -> TokenFile:
        """Wait for a shard, verify it, and return it open for reading.

        Raises `ShardError` if the shard cannot be fetched or does not fit the vocabulary, or
        nothing has arrived for `data.fetch_timeout_s`.
        """
        file = self._open.get(index)
        if file is None:
            file = self._local.open(index) or self._wait_for(index)
            with self._changed:
                self._open[index] = file
                if len(self._open) > MAX_OPEN_FILES:
                    del self._open[next(iter(self._open))]
        return file

    def progress(self) -> dict[str, int]:
        """Return counts of shards, those of local ones only in the process that fetches.

        `shards_ready` counts the plan's shards up to the first that is not local.
        """
        total = {"shards_total": len(self.names)}  # of the data (these comments are on the site)
        if not self._fetches:
            return total
        with self._changed:
            local, ready = self._local.count(), self._queue.ready()
        return {"shards_local": local, **total, "shards_ready": ready}  # on this machine

    def close(self) -> None:
        """End the threads, close the files, and remove unfinished ones. Local shards stay.

        A download that does not end within 10 s cannot publish, because its folder is removed.
        """
        with self._changed:
            self._stopped = True
            self._open.clear()
            self._cancel(BucketError(f"{self._local.folder}: closed before this arrived."))
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._local.close()

    def _wait_for(self, index: int) -> TokenFile:
        local, queue = self._local, self._queue
        arrived, fetches = None, self._fetches
        progressed = fetched = time.monotonic()
        local.locks.acquire(local.lock("use", index), shared=True, wait=True)
        try:
            while True:
                now = time.monotonic()
                if not local.locks.is_free(local.lock("fetch", index)):
                    fetched = now
                fetches = fetches or now - fetched > TAKEOVER_SECONDS
                if fetches:
                    with self._changed:
                        queue.request(index)
                        self._start_threads()
                file = local.open(index)
                if file is not None:
                    return file
                with self._changed:
                    failure = self._failure
                    if index in self._given_up:
                        failure = failure or self._troubles[index]
                    trouble = self._troubles.get(index) or next(iter(self._troubles.values()), None)
                if failure is not None:
                    raise failure
                if (present := local.arrived()) != arrived:
                    arrived, progressed = present, now
                if now - progressed > self._timeout_seconds:
                    shard = local.manifest.shards[index]
                    last = f" The last failure: {trouble}" if trouble else ""
                    raise ShardError(
                        f"{shard.name}: it is not local, and nothing has been fetched for "
                        f"{self._timeout_seconds:g} s.{last} Check the network and the bucket, "
                        f"raise data.fetch_timeout_s, or put {shard.file_names} in data.skip."
                    )
                time.sleep(POLL_SECONDS)
        finally:
            with self._changed:
                queue.requested.discard(index)
                if not self._fetches or index not in queue.wanted:
                    local.locks.release(local.lock("use", index))

    def _start_threads(self) -> None:
        if not self._threads and not self._stopped:
            self._threads = [
                threading.Thread(target=self._work, name="shard fetch", daemon=True)
                for _ in range(self._workers)
            ]
            for thread in self._threads:
                thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (task := self._next_task()) is not None:
                if isinstance(task, ShardDownload):
                    task.help()
                else:
                    self._fetch(task)
        except Exception as error:  # a thread's edge: `open` raises it
            if not isinstance(error, RefocusedError):
                folder = self._local.folder
                error = ShardError(f"The fetcher of {folder} failed: {error!r}. Start again.")
            with self._changed:
                if not self._stopped:
                    self._failure = self._failure or error
                    self._cancel(self._failure)

    def _next_task(self) -> ShardDownload | int | None:
        """Wait for a shard to fetch, or a download to help with; None at the end."""
        local, queue = self._local, self._queue
        with self._changed:
            while not self._stopped and self._failure is None:
                shared = {i: download for i, download in self._shared.items() if download.jobs}
                index = None
                if not self._starting:
                    index = queue.following(now=time.monotonic(), shared=shared)
                if index is not None and index not in shared:
                    if not local.locks.acquire(local.lock("fetch", index)):
                        queue.paused_until[index] = time.monotonic() + PAUSE_SECONDS
                        continue
                    if local.row(index) is not None:
                        queue.present.add(index)
                    elif self._has_room(index):
                        self._starting = True  # until its jobs are known, no other is started
                        return index
                    local.locks.release(local.lock("fetch", index))
                    if index in queue.present:
                        continue
                    index = next(iter(shared), None)  # until something has ended, help with that
                if index in shared:
                    return shared[index]
                self._changed.wait(PAUSE_SECONDS)
        return None

    def _fetch(self, index: int) -> None:
        local, queue = self._local, self._queue
        download = ShardDownload(local, index, changed=self._changed)
        try:
            try:
                with self._changed:
                    first = (*queue.requested, *queue.planned[:SPLIT_FIRST_SHARDS])
                    concurrent = 1 if index in first else 1 + queue.not_started()
                download.start(ranges=math.ceil(self._workers / concurrent))
                with self._changed:
                    self._shared[index] = download
            finally:
                with self._changed:
                    self._starting = False
                    self._changed.notify_all()
            try:
                download.run()
            finally:
                with self._changed:
                    del self._shared[index]
            download.finish()
        except (BucketError, ShardError, OSError) as error:
            self._retry(index, error)
        else:
            with self._changed:
                for failures in (self._failures, self._proofs, self._troubles):
                    failures.pop(index, None)
                # An outage, if there was one, is over.
                queue.paused_until = dict.fromkeys(self._given_up, math.inf)
                queue.present.add(index)
        finally:
            with self._changed:
                queue.busy.discard(index)
                with contextlib.suppress(OSError):
                    local.reserve(queue.busy)
                local.locks.release(local.lock("fetch", index))
                self._changed.notify_all()

    def _has_room(self, index: int) -> bool:
        """Evict what the limit and the disk require; reserve the room for a shard if there is any.

        All that is under way in any process counts with what it takes at most, and so do the files
        of other data sets. Evicted are shards that no process plans or awaits: first the oldest
        that this one has never planned, then those whose plan is the oldest. Without room, and with
        nothing under way, the shard's turn comes again after a pause. A requested shard stays until
        it is opened: soon, so that is no trouble.
        """
        local, queue, needed = self._local, self._queue, self._local.peaks[index]
        if not local.locks.acquire("room"):  # another process makes room; do not wait for it here
            return False
        try:
            incoming = needed + sum(local.peaks[i] for i in queue.busy) + local.reserved_by_others()
            stored, disk = local.stored(), shutil.disk_usage(local.folder)
            missing: float = incoming - (disk.free - disk.total // 20)  # 5 % of the disk stay free
            missing = max(missing, incoming + sum(stored.values()) - self._limit)
            kept = {local.path(i) for i in (*queue.wanted, *queue.busy)}
            plans = {local.path(i): plan for i, plan in queue.last_wanted.items()}
            for path in sorted(stored, key=lambda path: plans.get(path, 0)):
                if missing > 0 and path not in kept and local.evict(path):
                    missing -= stored[path]
            if missing <= 0:
                local.reserve({*queue.busy, index})
                queue.busy.add(index)
                return True
        except OSError as error:
            self._retry(index, error)
            return False
        finally:
            local.locks.release("room")
        if not queue.busy and not queue.requested & queue.present:
            text = (
                f"{local.manifest.shards[index].name}: {needed:,} bytes are needed below "
                f"{local.folder} for the download and the local form, but "
                f"{max(needed - int(missing), 0):,} are free. Free some space, set data.cache to "
                "another disk, or change data.disk_limit_gb."
            )
            self._retry(index, BucketError(text))
        return False

    def _retry(self, index: int, error: BucketError | ShardError | OSError) -> None:
        if isinstance(error, OSError):
            name, folder = self._local.manifest.shards[index].name, self._local.folder
            text = f"{name}: {error}, while writing it below {folder}. Free some space, or set "
            error = BucketError(f"{text}data.cache to another disk.")
        with self._changed:
            self._troubles[index] = error
            self._failures[index] += 1
            self._proofs[index] += isinstance(error, ShardError)
            pause = RETRY.wait_s(self._failures[index])
            if self._proofs[index] >= PROOFS:
                self._given_up.add(index)
                pause = math.inf
            self._queue.paused_until[index] = time.monotonic() + pause
        if self._failure is None and not self._stopped:
            then = f"Retrying in {pause:.1f} s." if pause < math.inf else "Training stops there."
            _log.warning("%s %s", error, then)

    def _cancel(self, reason: RefocusedError) -> None:
        for download in self._shared.values():
            download.cancel(reason)
        self._changed.notify_all()
