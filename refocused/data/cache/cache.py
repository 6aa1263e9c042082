"""`ShardCache`: the shards that are local, fetched ahead of use and evicted behind it."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.bucket.folder import DirectoryBucket
from refocused.config.data import DataConfig
from refocused.data.cache.fetch_heartbeat import FetcherFiles, FetcherState
from refocused.data.cache.fetch_threads import Fetcher
from refocused.data.cache.fetcher_watch import FetcherWatch
from refocused.data.cache.local_form import check_vocabulary
from refocused.data.cache.local_shards import LocalShards, TokenFile
from refocused.data.manifest.select_files import is_skipped
from refocused.data.manifest.shard_manifest import Manifest
from refocused.system.errors import ShardError

POLL_SECONDS = 0.05
ASK_SECONDS = 1.0
SILENCE_SECONDS = 30.0
MOST_OPEN = 512  # files; a process may have 1,024 by default


@dataclasses.dataclass(frozen=True, slots=True)
class CacheStats:
    """What a screen shows of a cache.

    Attributes:
        local_shards: Shards that are on this machine's disk.
        local_bytes: Bytes of them.
        fetched: Shards that this process has fetched.
        missing: Planned and pinned shards that are not local yet; known to the fetcher alone,
            None elsewhere.
        waiting: Calls of `open` that wait now.
        waited_seconds: Time that `open` has waited in all.
    """

    local_shards: int
    local_bytes: int
    fetched: int
    missing: int | None
    waiting: int
    waited_seconds: float


def threads_for(bucket: Bucket, most: int, *, cores: int) -> int:
    """Return how many threads make shards local: for a folder no more than there are cores.

    A store's threads wait for it most of the time. A folder's inflate and convert: eight of them on
    two cores took 1.15 times the CPU time that two did.
    """
    return min(most, cores) if isinstance(bucket, DirectoryBucket) else most


class ShardCache:
    """The local shards of one data set, on one machine.

    Each rank has one; that of local rank 0 fetches, the others read what it brings. Several
    threads may use one.

    Args:
        bucket: The source.
        manifest: Its shards; every index below is into them.
        folder: `data.cache`; the data set gets a folder of its own below it.
        data: Limits, threads and patience.
        vocabulary: Ids that the model knows.
        fetches: Whether this process fetches.
        silence_seconds: How long the fetcher may give no sign before it counts as gone.

    Raises:
        ShardError: The manifest names an id outside the vocabulary, or the folder cannot be made.
    """

    def __init__(
        self,
        bucket: Bucket,
        manifest: Manifest,
        folder: Path,
        *,
        data: DataConfig,
        vocabulary: int,
        fetches: bool,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        for shard in manifest.shards:
            if is_skipped(shard, data):
                continue
            for file in shard.files:
                check_vocabulary(file, file.max_id or 0, vocabulary=vocabulary)
        self._manifest = manifest
        self._data = data
        self._silence_seconds = silence_seconds
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
        self._open: dict[int, TokenFile] = {}
        self._planned: set[int] = set()
        self._pinned: set[int] = set()
        self._lock = threading.Lock()
        self._waiting = 0
        self._waited_seconds = 0.0
        self._fetcher: Fetcher | None = None
        if fetches:
            limit = None if data.disk_limit_gb is None else int(data.disk_limit_gb * 1e9)
            threads = threads_for(bucket, data.fetch_threads, cores=len(os.sched_getaffinity(0)))
            self._fetcher = Fetcher(
                bucket, self._local, self._files, limit_bytes=limit, threads=threads
            )
            self._fetcher.start()

    def __enter__(self) -> ShardCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def vocabulary(self) -> int:
        """Ids that the model knows."""
        return self._local.vocabulary

    def local_bytes(self, index: int) -> int:
        """Return the bytes of a shard's local form, local or not: what a plan is made with."""
        return self._local.bytes(index)

    def plan(self, needed: Sequence[int]) -> None:
        """Say which shards are wanted, in order of use: these are made local and kept.

        The others are closed here; their files go when the limit asks for it, the ones that were
        planned longest ago first.

        Raises:
            ShardError: They and the pinned ones do not fit into `data.disk_limit_gb`.
        """
        self._check_limit({*needed, *self._pinned})
        with self._lock:
            self._planned = set(needed)
            kept = self._planned | self._pinned
            self._open = {i: file for i, file in self._open.items() if i in kept}
        if self._fetcher is not None:
            self._fetcher.plan(needed)

    def pin(self, indices: Iterable[int]) -> None:
        """Keep shards for good, beside every plan.

        Raises:
            ShardError: They and the plan do not fit into `data.disk_limit_gb`.
        """
        pinned = {*self._pinned, *indices}
        self._check_limit({*self._planned, *pinned})
        with self._lock:
            self._pinned = pinned
        if self._fetcher is not None:
            self._fetcher.pin(pinned)

    def open(self, index: int) -> TokenFile:
        """Return a shard's tokens, verified and open for reading; wait for them.

        Raises:
            ShardError: The fetcher failed or is gone, the shard cannot be had or does not fit the
                vocabulary, or nothing has arrived for `data.fetch_timeout_s`.
        """
        file = self._open.get(index)
        if file is None:
            file = self._local.open(index) or self._wait_for(index)
            with self._lock:
                self._open[index] = file
                if len(self._open) > MOST_OPEN:
                    del self._open[next(iter(self._open))]
        return file

    def progress(self) -> dict[str, int]:
        """Return what other programs are told of the shards on this machine; reads no file.

        Returns:
            `shards_total`; and where this process fetches, `shards_local` and `shards_ready`: of
            the shards that come next, those that are local, up to the first that is not.
        """
        counts = self._fetcher.counts() if self._fetcher is not None else None
        total = {"shards_total": len(self._manifest.shards)}
        if counts is None:
            return total
        local, ready = counts
        return {"shards_local": local, **total, "shards_ready": ready}

    def stats(self) -> CacheStats:
        """Return counts for a screen; reads a small file for each shard that is local."""
        indices = range(len(self._manifest.shards))
        sizes = [row.size for row in map(self._local.row, indices) if row is not None]
        return CacheStats(
            local_shards=len(sizes),
            local_bytes=sum(sizes),
            fetched=self._fetcher.fetched if self._fetcher else 0,
            missing=self._fetcher.missing() if self._fetcher else None,
            waiting=self._waiting,
            waited_seconds=self._waited_seconds,
        )

    def close(self) -> None:
        """End the threads and close the files; local shards stay for the next run."""
        with self._lock:
            self._open.clear()
        if self._fetcher is not None:
            self._fetcher.close()

    def _check_limit(self, indices: set[int]) -> None:
        if self._data.disk_limit_gb is None:
            return  # the disk's own room is looked at before each fetch
        limit = int(self._data.disk_limit_gb * 1e9)
        needed = sum(self._local.bytes(index) for index in indices)
        if needed > limit:
            raise ShardError(
                f"{len(indices)} shards are needed at once and take {needed:,} bytes, and "
                f"data.disk_limit_gb allows {limit:,}. Raise data.disk_limit_gb to "
                f"{needed / 1e9:.6f} or more, or lower data.block_shards or "
                "data.fetch_ahead_shards."
            )

    def _wait_for(self, index: int) -> TokenFile:
        started = time.monotonic()
        with self._lock:
            self._waiting += 1
        try:
            return self._awaited(index)
        finally:
            with self._lock:
                self._waiting -= 1
                self._waited_seconds += time.monotonic() - started
            if self._fetcher is not None:
                self._fetcher.received(index)
            # Or the fetcher, which looks now and then, would bring it once more after its eviction.
            self._files.withdraw(index)

    def _awaited(self, index: int) -> TokenFile:
        progress: int | None = None
        moved = asked = time.monotonic()
        watch = FetcherWatch(
            self._files,
            name=self._manifest.shards[index].name,
            started=self._started,
            silence_seconds=self._silence_seconds,
        )
        self._ask(index)
        while True:
            file = self._local.open(index)
            if file is not None:
                return file
            now = time.monotonic()
            state = self._files.read_state()
            # Its own fetcher takes over when another process that holds the lock ends.
            if self._fetcher is None:
                watch.check(state)
            elif self._fetcher.failure is not None:
                raise self._fetcher.failure
            if state is not None and state.progress != progress:
                progress, moved = state.progress, now
            if now - moved > self._data.fetch_timeout_s:
                raise ShardError(self._timeout_text(index, state))
            if now - asked > ASK_SECONDS:
                self._ask(index)
                asked = now
            time.sleep(POLL_SECONDS)

    def _ask(self, index: int) -> None:
        """Ask this process's fetcher, or whichever process holds the folder's lock."""
        if self._fetcher is not None:
            self._fetcher.await_shard(index)
        if self._fetcher is None or not self._fetcher.leads:
            self._files.ask_for(index)

    def _timeout_text(self, index: int, state: FetcherState | None) -> str:
        trouble = f" The last failure: {state.trouble}" if state and state.trouble else ""
        who = f" by process {state.pid}" if state else ""
        return (
            f"{self._manifest.shards[index].name}: nothing has been fetched{who} for "
            f"{self._data.fetch_timeout_s:g} s, and it is not local.{trouble} Check the network "
            "and the bucket, raise data.fetch_timeout_s, or put "
            f"{self._manifest.shards[index].file_names} in data.skip."
        )
