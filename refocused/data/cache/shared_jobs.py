"""The pieces of one shard as jobs that the fetcher's idle threads help with."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

Job = Callable[[], None]


class SharedJobs:
    """Jobs that are taken in order by their owner and by whoever helps; the first failure ends it.

    Args:
        jobs: What is to be done.
        changed: Guards this, and is notified when a job ends.
    """

    def __init__(self, jobs: Sequence[Job], *, changed: threading.Condition) -> None:
        self._waiting = deque(jobs)
        self._changed = changed
        self._running = 0
        self._failure: Exception | None = None

    @property
    def open(self) -> bool:
        """Whether a job is left to take."""
        return bool(self._waiting)

    def help(self) -> bool:
        """Do the next job; say whether there was one. Its failure is the owner's affair."""
        with self._changed:
            if not self._waiting:
                return False
            job = self._waiting.popleft()
            self._running += 1
        try:
            job()
        except Exception as error:  # a thread's edge: the owner is told
            with self._changed:
                self._waiting.clear()
                self._failure = self._failure or error
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
        return True

    def run(self) -> None:
        """Do jobs until none is left or running.

        Raises:
            Exception: The first failure of a job.
        """
        while self.help():
            pass
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        if self._failure is not None:
            raise self._failure

    def cancel(self, reason: Exception) -> None:
        """Leave the jobs that nobody has begun; the owner gets the reason as their failure."""
        with self._changed:
            if self._waiting:
                self._waiting.clear()
                self._failure = self._failure or reason
