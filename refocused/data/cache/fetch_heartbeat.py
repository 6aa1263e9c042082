"""Heartbeat, lock and requests: the files by which processes share a cache folder."""

import contextlib
import dataclasses
import fcntl
import json
import os
from pathlib import Path

from refocused.system.atomic_files import replace_file
from refocused.system.locks import FileLock
from refocused.system.strict_json import parse_json_object

REQUEST_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Heartbeat:
    """State of the fetcher, written every second."""

    pid: int
    time: float  # seconds since 1970
    progress: int = 0  # changes whenever bytes or shards arrive
    error: str | None = None  # the failure that ended it
    trouble: str | None = None  # the last failure that it retries


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
        """Return the last heartbeat of any process, or None."""
        try:
            return Heartbeat(**parse_json_object(self._heartbeat.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def request(self, index: int) -> None:
        """Request a shard from the process that fetches; to be repeated while it is needed.

        On a full disk the request is lost, and the shard is fetched when the plan has it.
        """
        with contextlib.suppress(OSError):
            self._requests.mkdir(parents=True, exist_ok=True)
            (self._requests / str(index)).touch()

    def requests(self, *, now: float) -> list[int]:
        """Return the shards requested within the last 10 s; remove older requests."""
        found = []
        for path in sorted(self._requests.glob("*")):
            try:
                age = now - path.stat().st_mtime
            except FileNotFoundError:  # withdrawn since it was listed
                continue
            if age < REQUEST_SECONDS:
                found.append(int(path.name))
            else:
                path.unlink(missing_ok=True)
        return found

    def withdraw(self, index: int) -> None:
        """Remove a request; a rank that still waits repeats it."""
        (self._requests / str(index)).unlink(missing_ok=True)

    def is_locked(self) -> bool:
        """Whether a running process holds the lock."""
        try:
            descriptor = os.open(self._lock_path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            # Shared and only for an instant: a fetcher that is blocked by it tries again.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False
