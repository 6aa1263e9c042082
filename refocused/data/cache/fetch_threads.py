"""The threads that make shards local: one coordinator and several workers."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence

from refocused.bucket.bucket import Bucket
from refocused.data.cache.fetch_heartbeat import FetcherFiles, FetcherState
from refocused.data.cache.fetch_plan import FetchQueue
from refocused.data.cache.local_shards import LocalShards
from refocused.data.cache.shard_download import (
    Arrival,
    PassingError,
    free_bytes,
    progress_in,
    require_space,
)
from refocused.data.cache.shared_jobs import SharedJobs
from refocused.system.errors import RefocusedError, ShardError

POLL_SECONDS = 0.2
SIGN_SECONDS = 1.0
ATTEMPTS = 2
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
CLOSE_SECONDS = 10.0
# The first so many shards of the plan come by ranges over all threads at once. The others come
# whole, several beside each other, which costs fewer requests, until there is one for each thread
# no longer: the last ones are divided, so that no thread is left without work before the end.
HURRIED_SHARDS = 4

_log = logging.getLogger(__name__)


class Fetcher:
    """Makes the planned shards local, in order, within the byte limit.

    It works only while it holds the folder's lock; a second one waits for the first to end. Its
    failure is kept and told by `failure` here and by the state file to other processes.

    Args:
        bucket: Where shards come from.
        local: Where they go.
        files: How other processes are told and asked.
        limit_bytes: Most that the local shards may take; None: what is free but 5 % of the disk.
        threads: Downloads at once.
    """

    def __init__(
        self,
        bucket: Bucket,
        local: LocalShards,
        files: FetcherFiles,
        *,
        limit_bytes: int | None,
        threads: int,
    ) -> None:
        self._bucket = bucket
        self._local = local
        self._files = files
        self._limit_bytes = limit_bytes
        self._folder = local.folder / "incoming" / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._changed = threading.Condition()
        self._signing = threading.Lock()
        self._queue = FetchQueue(local.bytes)
        self._shared: dict[int, SharedJobs] = {}
        self._beginning = False
        self._ways = threads
        self._attempts: dict[int, int] = {}
        self._asked_here: set[int] = set()
        self._asked_elsewhere: set[int] = set()
        self._leads = False
        self._stopped = False
        self.failure: RefocusedError | None = None
        self.trouble: str | None = None
        self.fetched = 0
        jobs = [("shard coordinator", self._coordinate), *[("shard fetch", self._work)] * threads]
        self._threads = [threading.Thread(target=job, name=name, daemon=True) for name, job in jobs]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    @property
    def leads(self) -> bool:
        """Whether it holds the folder's lock."""
        return self._leads

    def plan(self, needed: Sequence[int]) -> None:
        """Replace the shards to make and keep local, in order of use."""
        with self._changed:
            self._queue.plan(needed)
            self._changed.notify_all()

    def pin(self, indices: Iterable[int]) -> None:
        """Add shards to make and keep local for good."""
        with self._changed:
            self._queue.pin(indices)
            self._changed.notify_all()

    def await_shard(self, index: int) -> None:
        """Fetch a shard next: someone in this process waits for it."""
        with self._changed:
            if index not in self._asked_here:
                self._asked_here.add(index)
                self._renew_asked()

    def received(self, index: int) -> None:
        """Nobody in this process waits for a shard any longer."""
        with self._changed:
            self._asked_here.discard(index)
            self._renew_asked()

    def missing(self) -> int:
        """Return how many wanted shards are not local yet."""
        with self._changed:
            return self._queue.missing()

    def counts(self) -> tuple[int, int] | None:
        """Return how many shards are local, and how many of the plan in a row from its first on.

        None while another process fetches into the folder, or the folder was not yet read.
        """
        with self._changed:
            return (len(self._queue.present), self._queue.ready()) if self._leads else None

    def limit_bytes(self) -> int:
        """Return the most that the local shards may take now."""
        if self._limit_bytes is not None:
            return self._limit_bytes
        return self._local.total_bytes() + free_bytes(self._local.folder)

    def close(self) -> None:
        """End the threads, give the lock back, and remove unfinished files.

        A download that does not end within 10 s is left to end by itself; it publishes nothing,
        because its folder is gone.
        """
        with self._changed:
            self._stopped = True
            self._cancel(PassingError(f"{self._local.folder}: closed before this arrived."))
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        shutil.rmtree(self._folder, ignore_errors=True)
        self._files.release_lock()
        self._leads = False

    def _coordinate(self) -> None:
        """Take the lock, then sign and collect what was asked until the end."""
        try:
            self._lead()
            signed = 0.0
            while not self._stopped:
                self._collect()
                if time.monotonic() - signed >= SIGN_SECONDS:
                    self._sign()
                    signed = time.monotonic()
                self._wait(POLL_SECONDS)
        except Exception as error:  # a thread's edge: its owner is told
            self._fail(error)

    def _lead(self) -> None:
        warned = False
        while not self._stopped:
            if self._files.take_lock():
                self._begin()
                return
            if not warned:
                _log.warning(
                    "%s: another process fetches into this folder; taking what it brings",
                    self._local.folder,
                )
                warned = True
            self._wait(POLL_SECONDS)

    def _begin(self) -> None:
        incoming = self._folder.parent
        shutil.rmtree(incoming, ignore_errors=True)  # what a killed fetcher left unfinished
        self._folder.mkdir(parents=True)
        indices = range(len(self._local.manifest.shards))
        present = {index for index in indices if self._local.row(index) is not None}
        for index in set(indices) - present:
            self._local.remove(index)  # published in part, or read with other settings
        with self._changed:
            self._queue.present |= present
            self._leads = True
            self._changed.notify_all()

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped, seconds)

    def _collect(self) -> None:
        asked = self._files.asked_for(now=time.time())
        with self._changed:
            self._asked_elsewhere = set(asked)
            for index in self._queue.present & (self._asked_here | self._asked_elsewhere):
                if self._local.row(index) is None:  # it went behind the fetcher's back
                    self._queue.present.discard(index)
                else:
                    self._answer(index)
            self._renew_asked()

    def _answer(self, index: int) -> None:
        """Take a request of another process for done; it asks again if it was too slow."""
        if index in self._asked_elsewhere:
            self._asked_elsewhere.discard(index)
            self._files.withdraw(index)

    def _renew_asked(self) -> None:
        self._queue.ask(sorted(self._asked_here) + sorted(self._asked_elsewhere - self._asked_here))
        self._changed.notify_all()

    def _sign(self) -> None:
        state = FetcherState(
            pid=os.getpid(),
            time=time.time(),
            progress=self.fetched + progress_in(self._folder),
            error=str(self.failure) if self.failure else None,
            trouble=self.trouble,
        )
        # On a full disk nothing can be signed; those who wait see silence and give up by that.
        with self._signing, contextlib.suppress(OSError):
            self._files.write_state(state)

    def _work(self) -> None:
        while (task := self._take()) is not None:
            if isinstance(task, SharedJobs):
                task.help()
            else:
                self._bring(task)

    def _bring(self, index: int) -> None:
        arrival = Arrival(self._bucket, self._local, index, self._folder)
        try:
            with self._others_waiting():
                self._make_room(index)
                jobs = self._share(arrival)
            self._run(jobs, index)
            arrival.finish()
        except PassingError as error:
            self._try_again(index, error)
        except ShardError as error:
            if self._attempts.get(index, 0) + 1 >= ATTEMPTS:
                self._fail(error)
            self._try_again(index, error)
        except Exception as error:  # a thread's edge: its owner is told
            self._fail(error)
        else:
            self._arrived(index)

    def _take(self) -> SharedJobs | int | None:
        """Wait for a shard to bring, or jobs of one to help with; None when it is time to end."""
        with self._changed:
            while not self._stopped and self.failure is None:
                shared = {index: jobs for index, jobs in self._shared.items() if jobs.open}
                index = None
                if self._leads and not self._beginning:
                    index = self._queue.following(now=time.monotonic(), shared=shared)
                if index in shared:
                    return shared[index]
                if index is not None:
                    self._queue.busy.add(index)
                    self._beginning = True  # the others wait for its jobs, or go on without them
                    return index
                self._changed.wait(
                    LONGEST_PAUSE_SECONDS
                )  # the coordinator wakes it five times a second
        return None

    @contextlib.contextmanager
    def _others_waiting(self) -> Iterator[None]:
        """Begin a shard while no other is begun: its jobs come before those of later ones."""
        try:
            yield
        finally:
            with self._changed:
                self._beginning = False
                self._changed.notify_all()

    def _share(self, arrival: Arrival) -> SharedJobs:
        """Offer what brings the files of a shard to the threads that have nothing to do."""
        with self._changed:
            hurried = self._queue.is_among_first(HURRIED_SHARDS, arrival.index)
            sharing = 1 if hurried else 1 + self._queue.not_begun()
        work = arrival.jobs(ways=math.ceil(self._ways / sharing))
        jobs = SharedJobs(work, changed=self._changed)
        with self._changed:
            self._shared[arrival.index] = jobs
        return jobs

    def _run(self, jobs: SharedJobs, index: int) -> None:
        try:
            jobs.run()
        finally:
            with self._changed:
                del self._shared[index]

    def _cancel(self, reason: RefocusedError) -> None:
        for jobs in self._shared.values():
            jobs.cancel(reason)
        self._changed.notify_all()

    def _make_room(self, index: int) -> None:
        """Evict what the limit and the disk ask for; the reservation is counted already."""
        with self._changed:
            shard = self._local.manifest.shards[index]
            over = self._queue.present_bytes() - self.limit_bytes()
            short = shard.size + self._local.bytes(index) - free_bytes(self._local.folder)
            for victim in self._queue.evictable(bytes_wanted=max(over, short)):
                self._queue.present.discard(victim)
                self._local.remove(victim)
        require_space(self._local, index, free_bytes=free_bytes(self._local.folder))

    def _arrived(self, index: int) -> None:
        with self._changed:
            self.fetched += 1
            self.trouble = None
            self._attempts.pop(index, None)
            self._queue.busy.discard(index)
            self._queue.present.add(index)
            self._answer(index)
            self._renew_asked()

    def _try_again(self, index: int, error: RefocusedError) -> None:
        with self._changed:
            count = self._attempts[index] = self._attempts.get(index, 0) + 1
            pause = min(FIRST_PAUSE_SECONDS * 2 ** (count - 1), LONGEST_PAUSE_SECONDS)
            self._queue.pause(index, until=time.monotonic() + pause)
            self._queue.busy.discard(index)
            self.trouble = str(error)
        if self.failure is None and not self._stopped:
            _log.warning("%s Trying again in %.1f s.", error, pause)

    def _fail(self, error: Exception) -> None:
        """Keep the first failure, and tell the other processes at once."""
        with self._changed:
            if self._stopped:
                return
            if not isinstance(error, RefocusedError):
                folder = self._local.folder
                error = ShardError(f"The fetcher of {folder} failed: {error!r}. Start again.")
            self.failure = self.failure or error
            self._cancel(self.failure)
        if self._leads:
            self._sign()
