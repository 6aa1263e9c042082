"""How a rank that waits for a shard notices that nobody will bring it."""

from __future__ import annotations

import time

from refocused.data.cache.fetch_heartbeat import FetcherFiles, FetcherState
from refocused.system.errors import ShardError

# Longer than a second fetcher of the folder takes to follow the first.
UNLED_SECONDS = 2.0


class FetcherWatch:
    """Watches the fetcher of another process while one shard is awaited.

    A process that died is missed within two seconds, by the lock that the kernel took from it; one
    that hangs, or never started, by its silence.

    Args:
        files: The fetcher's files.
        name: The shard, for messages.
        started: When this run began, in seconds since 1970.
        silence_seconds: How long the fetcher may give no sign.
    """

    def __init__(
        self, files: FetcherFiles, *, name: str, started: float, silence_seconds: float
    ) -> None:
        self._files = files
        self._name = name
        self._started = started
        self._silence_seconds = silence_seconds
        self._led = time.monotonic()

    def check(self, state: FetcherState | None) -> None:
        """Raise when the shard, which is not local, will not come.

        Raises:
            ShardError: The fetcher failed, its process is gone, or it gives no sign.
        """
        # What an earlier run left in the folder says nothing about this one.
        is_ours = state is not None and state.time >= self._started
        if state is not None and is_ours and state.error is not None:
            raise ShardError(f"{state.error} (told by the fetcher, process {state.pid})")
        if not is_ours or self._files.is_led():
            self._led = time.monotonic()
        elif state is not None and time.monotonic() - self._led > UNLED_SECONDS:
            raise self._absent(f"process {state.pid}", "has ended")
        signed = max(state.time if state else 0.0, self._started)
        silent = time.time() - signed
        if silent > self._silence_seconds:
            who = f"process {state.pid}" if state else "which never started"
            raise self._absent(who, f"has given no sign for {silent:.0f} s")

    def _absent(self, who: str, what: str) -> ShardError:
        return ShardError(
            f"{self._name}: it is not local, and its fetcher ({who}) {what}, so it is gone. "
            "See the log of local rank 0, and start again."
        )
