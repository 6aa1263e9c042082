"""Small files by which the processes of a machine share one cache folder."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from pathlib import Path

from refocused.system.atomic_files import replace_file
from refocused.system.errors import ShardError
from refocused.system.locks import FileLock
from refocused.system.strict_json import parse_json_object

REQUEST_SECONDS = 10.0
UNLED_SECONDS = 2.0  # longer than a second fetcher takes to follow the first


@dataclasses.dataclass(frozen=True, slots=True)
class Heartbeat:
    """The fetcher's last sign of life."""

    pid: int
    time: float  # seconds since 1970
    progress: int = 0  # changes whenever bytes or shards arrive
    error: str | None = None  # why it has given up
    trouble: str | None = None  # the last failure, which it is retrying


class FetcherFiles:
    """The heartbeat, the lock and the requests of one cache folder."""

    def __init__(self, folder: Path) -> None:
        self._heartbeat = folder / "fetcher.json"
        self._requests = folder / "asked"
        self._lock_path = folder / "fetcher.lock"
        self.lock = FileLock(self._lock_path)  # its holder is the folder's only fetcher

    def beat(self, heartbeat: Heartbeat) -> None:
        """Replace the heartbeat, atomically."""
        replace_file(self._heartbeat, json.dumps(dataclasses.asdict(heartbeat)).encode())

    def heartbeat(self) -> Heartbeat | None:
        """Return the last heartbeat, of whichever process wrote it."""
        try:
            return Heartbeat(**parse_json_object(self._heartbeat.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def request(self, index: int) -> None:
        """Request a shard from whichever process fetches; to be repeated while it is wanted."""
        self._requests.mkdir(parents=True, exist_ok=True)
        (self._requests / str(index)).touch()

    def requests(self, *, now: float) -> list[int]:
        """Return the shards requested within the last 10 s; remove older requests."""
        found = []
        for path in sorted(self._requests.glob("*")):
            try:
                age = now - path.stat().st_mtime
            except FileNotFoundError:  # withdrawn by its rank since it was listed
                continue
            if age < REQUEST_SECONDS:
                found.append(int(path.name))
            else:
                path.unlink(missing_ok=True)
        return found

    def withdraw(self, index: int) -> None:
        """Remove a request for a shard that is local now; a rank that still waits repeats it."""
        (self._requests / str(index)).unlink(missing_ok=True)

    def is_led(self) -> bool:
        """Whether a living process holds the lock; the kernel releases that of a dead one."""
        try:
            descriptor = os.open(self._lock_path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            # Shared and for an instant: a fetcher that meets it tries again.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False


class FetcherWatch:
    """Watches the fetcher of another process while a rank waits for one shard.

    A process that died is noticed within two seconds, by its lock; one that hangs, or never
    started, by its silence. `started` is when this run began, in seconds since 1970.
    """

    def __init__(
        self, files: FetcherFiles, *, name: str, started: float, silence_seconds: float
    ) -> None:
        self._files = files
        self._name = name
        self._started = started
        self._silence_seconds = silence_seconds
        self._led = time.monotonic()

    def check(self, heartbeat: Heartbeat | None) -> None:
        """Raise `ShardError` if the fetcher failed, its process ended, or it is silent."""
        now, seen = time.monotonic(), self._started
        who = f"process {heartbeat.pid}" if heartbeat else "which never started"
        # What an earlier run left in the folder says nothing about this one.
        if heartbeat is not None and heartbeat.time >= self._started:
            seen = heartbeat.time
            if heartbeat.error is not None:
                raise ShardError(f"{heartbeat.error} (reported by the fetcher, {who})")
        if seen == self._started or self._files.is_led():
            self._led = now
        silent = time.time() - seen
        if now - self._led > UNLED_SECONDS:
            state = "has ended"
        elif silent > self._silence_seconds:
            state = f"has given no sign for {silent:.0f} s"
        else:
            return
        raise ShardError(
            f"{self._name}: it is not local, and its fetcher ({who}) {state}, so it is gone. "
            "See the log of local rank 0, and start again."
        )
