"""The local shards of a run: planned, fetched ahead of use, verified, and evicted after it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.data.cache.fetch_plan import FetchQueue
from refocused.data.cache.fetch_threads import Fetcher
from refocused.data.cache.local_shards import (
    FetcherFiles,
    LocalShards,
    TokenFile,
    check_vocabulary,
    peak_bytes,
)
from refocused.data.manifest.shard_manifest import Manifest, is_skipped
from refocused.system.errors import ShardError

POLL_SECONDS = 0.05
REPEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
UNLOCKED_SECONDS = 2.0  # longer than a second fetcher takes to acquire the lock after the first
MAX_OPEN_FILES = 512  # the default limit of a process is 1,024


def threads_for(buckets: Iterable[Bucket], threads: int, *, cores: int) -> int:
    """Limit the number of fetch threads to the cores if all sources are folders.

    Threads that read a store mostly wait for it; those that read a folder inflate and convert.
    Eight of them on two cores took 1.15 times the CPU time of two.
    """
    are_folders = all(isinstance(bucket, DirectoryBucket) for bucket in buckets)
    return min(threads, cores) if are_folders else threads


class ShardCache:
    """The local shards of one data set on one machine; safe to share between threads.

    Each rank has one. Only that of local rank 0 fetches; the others read the fetched files.

    Args:
        buckets: By the source of a mixture; the only one without a mixture has the name "".
        manifest: The shards; every index below refers to them.
        folder: `data.cache`; the data set gets its own folder below it.
        vocabulary: Size of the model's vocabulary.
        fetches: Whether this cache fetches.
        silence_seconds: Longest time between heartbeats before the fetcher counts as dead.

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
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        for shard in manifest.shards:
            if not is_skipped(shard, data):
                for file in shard.files:
                    check_vocabulary(file, file.max_id or 0, vocabulary=vocabulary)
        self.names = [shard.file_names for shard in manifest.shards]
        self.vocabulary = vocabulary
        self._timeout_seconds = data.fetch_timeout_s
        self._silence_seconds = silence_seconds
        self._limit = None if data.disk_limit_gb is None else int(data.disk_limit_gb * 1e9)
        self._local = LocalShards(folder, manifest=manifest, data=data, vocabulary=vocabulary)
        self._peaks = [
            peak_bytes(shard, buckets[self._local.source(index)], vocabulary=vocabulary)
            for index, shard in enumerate(manifest.shards)
        ]
        try:
            self._local.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ShardError(
                f"{self._local.folder}: this folder for local shards cannot be created "
                f"({error.strerror}). Set data.cache to a writable folder."
            ) from error
        self._files = FetcherFiles(self._local.folder)
        # A heartbeat of this run differs from the present one, which may be of an earlier run.
        self._heartbeat, self._is_heard = self._files.heartbeat(), False
        self._queue = FetchQueue()
        self._open: dict[int, TokenFile] = {}
        self._fetcher: Fetcher | None = None
        if fetches:
            cores = len(os.sched_getaffinity(0))
            self._fetcher = Fetcher(
                buckets,
                self._local,
                self._files,
                self._queue,
                limit_bytes=self._limit,
                peaks=self._peaks,
                threads=threads_for(buckets.values(), data.fetch_threads, cores=cores),
            )

    def __enter__(self) -> ShardCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def local_bytes(self, index: int) -> int:
        """Return the bytes of a shard's local form, whether or not it is local."""
        return self._local.bytes(index)

    def plan(self, needed: Sequence[int]) -> None:
        """Replace the plan: the shards to fetch and keep local, in order of use.

        Other shards are closed, and evicted if the limit requires it, oldest plan first. Raises
        `ShardError` if planned and pinned shards do not fit into `data.disk_limit_gb`.
        """
        with self._queue.changed:
            self._set_plan(needed, self._queue.pinned)

    def pin(self, indices: Iterable[int]) -> None:
        """Keep shards local permanently, in addition to any plan; raises as `plan`."""
        with self._queue.changed:
            self._set_plan(self._queue.planned, {*self._queue.pinned, *indices})

    def _set_plan(self, planned: Sequence[int], pinned: set[int]) -> None:
        kept = {*planned, *pinned}
        needed = sum(map(self._local.bytes, kept))
        # Besides them, one is on its way.
        needed += max((self._peaks[i] - self._local.bytes(i) for i in kept), default=0)
        # Without a limit, the free space of the disk is checked before each fetch.
        if self._limit is not None and needed > self._limit:
            raise ShardError(
                f"{len(kept)} shards are needed at once and take {needed:,} bytes, but "
                f"data.disk_limit_gb allows {self._limit:,}. Raise data.disk_limit_gb to "
                f"{needed / 1e9:.6f} or more, or lower data.block_shards or "
                "data.fetch_ahead_shards."
            )
        self._queue.plan(planned)
        self._queue.pinned = pinned
        self._queue.changed.notify_all()
        self._open = {index: file for index, file in self._open.items() if index in kept}

    def open(self, index: int) -> TokenFile:
        """Wait for a shard, verify it, and return it open for reading.

        Raises `ShardError` if the fetcher failed or died, the shard cannot be fetched or does not
        fit the vocabulary, or nothing has arrived for `data.fetch_timeout_s`.
        """
        file = self._open.get(index)
        if file is None:
            file = self._local.open(index) or self._wait_for(index)
            with self._queue.changed:
                self._open[index] = file
                if len(self._open) > MAX_OPEN_FILES:
                    del self._open[next(iter(self._open))]
        return file

    def progress(self) -> dict[str, int]:
        """Return counts of shards, those of local ones only in the process that fetches.

        `shards_ready` counts the plan's shards up to the first that is not local.
        """
        total = {"shards_total": len(self.names)}  # of the data (these comments are on the site)
        if self._fetcher is None:
            return total
        with self._queue.changed:
            if not self._fetcher.leads:
                return total
            local, ready = len(self._queue.present), self._queue.ready()
        return {"shards_local": local, **total, "shards_ready": ready}  # on this machine

    def close(self) -> None:
        """End the threads and close the files. Local shards stay for the next run."""
        with self._queue.changed:
            self._open.clear()
        if self._fetcher is not None:
            self._fetcher.close()

    def _wait_for(self, index: int) -> TokenFile:
        progress: int | None = None
        progressed = heard = locked = time.monotonic()
        requested = -REPEAT_SECONDS
        try:
            while True:
                now = time.monotonic()
                if now - requested > REPEAT_SECONDS:
                    self._files.request(index)
                    if self._fetcher is not None:
                        self._fetcher.collect_requests()
                    requested = now
                file = self._local.open(index)
                if file is not None:
                    return file
                heartbeat = self._files.heartbeat()
                if heartbeat != self._heartbeat:
                    self._heartbeat, self._is_heard, heard = heartbeat, True, now
                # This rank's own fetcher, if any, takes over when the lock's holder ends.
                if self._fetcher is None:
                    if not self._is_heard or self._files.is_locked():
                        locked = now
                    self._check_fetcher(index, silent=now - heard, unlocked=now - locked)
                elif failure := self._fetcher.failure_of(index):
                    raise failure
                if heartbeat is not None and heartbeat.progress != progress:
                    progress, progressed = heartbeat.progress, now
                if now - progressed > self._timeout_seconds:
                    shard = self._local.manifest.shards[index]
                    fetcher = f" by process {heartbeat.pid}" if heartbeat else ""
                    troubles = dict(heartbeat.troubles) if heartbeat else {}
                    if self._fetcher is not None:  # a full disk takes no heartbeat
                        failures = self._fetcher.troubles.copy()
                        troubles |= {str(i): str(error) for i, error in failures.items()}
                    trouble = troubles.get(str(index)) or next(iter(troubles.values()), None)
                    trouble = f" The last failure: {trouble}" if trouble else ""
                    raise ShardError(
                        f"{shard.name}: it is not local, and nothing has been fetched{fetcher} for "
                        f"{self._timeout_seconds:g} s.{trouble} Check the network and the bucket, "
                        f"raise data.fetch_timeout_s, or put {shard.file_names} in data.skip."
                    )
                time.sleep(POLL_SECONDS)
        finally:  # otherwise the fetcher would fetch the shard again after its eviction
            self._files.withdraw(index)

    def _check_fetcher(self, index: int, *, silent: float, unlocked: float) -> None:
        """Raise `ShardError` if the fetcher failed, ended, hangs or never started.

        Args:
            index: The shard that this rank waits for.
            silent: Seconds of this wait without a new heartbeat, by this process's timer: clocks
                of the wall are stepped, and a network disk has its own.
            unlocked: Seconds that the fetcher's lock has been free.
        """
        heartbeat = self._heartbeat
        fetcher = f"process {heartbeat.pid}" if heartbeat else "which never started"
        if heartbeat is not None and self._is_heard:
            error = heartbeat.error
            if index in heartbeat.given_up:
                error = heartbeat.troubles[str(index)]
            if error is not None:
                raise ShardError(f"{error} (reported by the fetcher, {fetcher})")
        if unlocked > UNLOCKED_SECONDS:
            state = "has ended"
        elif silent > self._silence_seconds:
            state = f"has written no heartbeat for {silent:.0f} s"
        else:
            return
        name = self._local.manifest.shards[index].name
        raise ShardError(
            f"{name}: it is not local, and its fetcher ({fetcher}) {state}. "
            "See the log of local rank 0, and start again."
        )
