"""The local shards of a run: planned, fetched ahead of use, verified, and evicted behind it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.data.cache.fetch_heartbeat import FetcherFiles, Heartbeat
from refocused.data.cache.fetch_plan import FetchQueue
from refocused.data.cache.fetch_threads import Fetcher
from refocused.data.cache.local_shards import LocalShards, TokenFile, check_vocabulary
from refocused.data.manifest.select_files import is_skipped
from refocused.data.manifest.shard_manifest import Manifest
from refocused.system.errors import ShardError

POLL_SECONDS = 0.05
REPEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
UNLED_SECONDS = 2.0  # longer than a second fetcher takes to follow the first
MOST_OPEN = 512  # files; a process may have 1,024 by default


def threads_for(buckets: Iterable[Bucket], most: int, *, cores: int) -> int:
    """Return how many threads fetch: for folders no more than there are cores.

    Threads of a store wait for it most of the time. Those of a folder inflate and convert: eight
    on two cores took 1.15 times the CPU time that two did.
    """
    are_folders = all(isinstance(bucket, DirectoryBucket) for bucket in buckets)
    return min(most, cores) if are_folders else most


class ShardCache:
    """The local shards of one data set, on one machine.

    Each rank has one. Only that of local rank 0 fetches; the others read what it fetched. Several
    threads may use one.

    Args:
        source: The bucket, or the buckets of a mixture by the names of their sources.
        manifest: Its shards; every index below is into them.
        folder: `data.cache`; the data set gets a folder of its own below it.
        vocabulary: Ids that the model knows.
        silence_seconds: How long the fetcher may write no heartbeat before it counts as gone.

    Raises:
        ShardError: The manifest names an id outside the vocabulary, or the folder cannot be made.
    """

    def __init__(
        self,
        source: Bucket | Mapping[str, Bucket],
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
        self._started = time.time()
        self._local = LocalShards(folder, manifest=manifest, data=data, vocabulary=vocabulary)
        try:
            self._local.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ShardError(
                f"{self._local.folder} cannot be made for the local shards: {error.strerror}. Set "
                "data.cache to a folder that can be written."
            ) from error
        self._files = FetcherFiles(self._local.folder)
        self._queue = FetchQueue(self._local.bytes)
        self._open: dict[int, TokenFile] = {}
        self._fetcher: Fetcher | None = None
        if fetches:
            buckets = source if isinstance(source, Mapping) else {"": source}
            cores = len(os.sched_getaffinity(0))
            self._fetcher = Fetcher(
                buckets,
                self._local,
                self._files,
                self._queue,
                limit_bytes=self._limit,
                threads=threads_for(buckets.values(), data.fetch_threads, cores=cores),
            )

    def __enter__(self) -> ShardCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def local_bytes(self, index: int) -> int:
        """Return the bytes of a shard's local form, whether it is local or not."""
        return self._local.bytes(index)

    def plan(self, needed: Sequence[int]) -> None:
        """Replace the plan: the shards to make and keep local, in order of use.

        The others are closed, and evicted when the limit requires it, oldest plan first. Raises
        `ShardError` if they and the pinned ones do not fit into `data.disk_limit_gb`.
        """
        with self._queue.changed:
            self._want(needed, self._queue.pinned)

    def pin(self, indices: Iterable[int]) -> None:
        """Keep shards for good, besides every plan; raises as `plan`."""
        with self._queue.changed:
            self._want(self._queue.planned, {*self._queue.pinned, *indices})

    def _want(self, planned: Sequence[int], pinned: set[int]) -> None:
        wanted = {*planned, *pinned}
        needed = sum(map(self._local.bytes, wanted))
        # Without a limit, the free space of the disk is checked before each fetch.
        if self._limit is not None and needed > self._limit:
            raise ShardError(
                f"{len(wanted)} shards are needed at once and take {needed:,} bytes, and "
                f"data.disk_limit_gb allows {self._limit:,}. Raise data.disk_limit_gb to "
                f"{needed / 1e9:.6f} or more, or lower data.block_shards or "
                "data.fetch_ahead_shards."
            )
        self._queue.plan(planned)
        self._queue.pinned = pinned
        self._queue.changed.notify_all()
        self._open = {index: file for index, file in self._open.items() if index in wanted}

    def open(self, index: int) -> TokenFile:
        """Return a shard's tokens, verified and open for reading; wait for them.

        Raises `ShardError` if the fetcher failed or is gone, if the shard cannot be had or does not
        fit the vocabulary, or if nothing has arrived for `data.fetch_timeout_s`.
        """
        file = self._open.get(index)
        if file is None:
            file = self._local.open(index) or self._wait_for(index)
            with self._queue.changed:
                self._open[index] = file
                if len(self._open) > MOST_OPEN:
                    del self._open[next(iter(self._open))]
        return file

    def progress(self) -> dict[str, int]:
        """Return counts for other programs; of local shards only in the process that fetches.

        `shards_ready` are the local shards of the plan, up to the first that is not local.
        """
        total = {"shards_total": len(self.names)}
        if self._fetcher is None:
            return total
        with self._queue.changed:
            if not self._fetcher.leads:
                return total
            local, ready = len(self._queue.present), self._queue.ready()
        return {"shards_local": local, **total, "shards_ready": ready}

    def close(self) -> None:
        """End the threads and close the files; local shards stay for the next run."""
        with self._queue.changed:
            self._open.clear()
        if self._fetcher is not None:
            self._fetcher.close()

    def _wait_for(self, index: int) -> TokenFile:
        progress: int | None = None
        moved = led = time.monotonic()
        asked = -REPEAT_SECONDS
        try:
            while True:
                now = time.monotonic()
                if now - asked > REPEAT_SECONDS:
                    self._files.request(index)
                    if self._fetcher is not None:
                        self._fetcher.collect_requests()
                    asked = now
                file = self._local.open(index)
                if file is not None:
                    return file
                heartbeat = self._files.heartbeat()
                # Its own fetcher takes over when another process that holds the lock ends.
                if self._fetcher is None:
                    led = self._last_led(index, heartbeat, led)
                elif self._fetcher.failure is not None:
                    raise self._fetcher.failure
                if heartbeat is not None and heartbeat.progress != progress:
                    progress, moved = heartbeat.progress, now
                if now - moved > self._timeout_seconds:
                    raise ShardError(self._timeout_text(index, heartbeat))
                time.sleep(POLL_SECONDS)
        finally:  # or the fetcher, which polls, would fetch it once more after its eviction
            self._files.withdraw(index)

    def _last_led(self, index: int, heartbeat: Heartbeat | None, led: float) -> float:
        """Return when the fetcher's lock was last held, on the monotonic clock.

        Raises `ShardError` if the fetcher failed, its process ended, which shows by the lock within
        two seconds, or it hangs or never started, which shows by its silence.
        """
        now, seen = time.monotonic(), self._started
        who = f"process {heartbeat.pid}" if heartbeat else "which never started"
        # What an earlier run left in the folder says nothing about this one.
        if heartbeat is not None and heartbeat.time >= self._started:
            seen = heartbeat.time
            if heartbeat.error is not None:
                raise ShardError(f"{heartbeat.error} (reported by the fetcher, {who})")
        if seen == self._started or self._files.is_led():
            led = now
        silent = time.time() - seen
        if now - led > UNLED_SECONDS:
            state = "has ended"
        elif silent > self._silence_seconds:
            state = f"has given no sign for {silent:.0f} s"
        else:
            return led
        name = self._local.manifest.shards[index].name
        raise ShardError(
            f"{name}: it is not local, and its fetcher ({who}) {state}, so it is gone. "
            "See the log of local rank 0, and start again."
        )

    def _timeout_text(self, index: int, heartbeat: Heartbeat | None) -> str:
        shard = self._local.manifest.shards[index]
        who = f" by process {heartbeat.pid}" if heartbeat else ""
        trouble = heartbeat.trouble if heartbeat else None
        trouble = f" The last failure: {trouble}" if trouble else ""
        return (
            f"{shard.name}: nothing has been fetched{who} for {self._timeout_seconds:g} s, and it "
            f"is not local.{trouble} Check the network and the bucket, raise data.fetch_timeout_s, "
            f"or put {shard.file_names} in data.skip."
        )
