"""What the fetcher of a folder tells the ranks that wait, and what they ask of it: small files."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from pathlib import Path

from refocused.system.atomic_files import replace_file
from refocused.system.locks import FileLock
from refocused.system.strict_json import parse_json_object

ASK_LASTS_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class FetcherState:
    """The fetcher's last sign of life.

    Attributes:
        pid: Its process.
        time: When it was written, in seconds since 1970.
        progress: A number that changes whenever bytes or shards arrive.
        error: Why it has given up; None while it works.
        trouble: The last failure that it is trying again.
    """

    pid: int
    time: float
    progress: int = 0
    error: str | None = None
    trouble: str | None = None


class FetcherFiles:
    """The files by which the processes of one machine speak about one folder."""

    def __init__(self, folder: Path) -> None:
        self._state = folder / "fetcher.json"
        self._asked = folder / "asked"
        self._lock_path = folder / "fetcher.lock"
        self._lock = FileLock(self._lock_path)

    def write_state(self, state: FetcherState) -> None:
        """Replace the sign of life, atomically."""
        replace_file(self._state, json.dumps(dataclasses.asdict(state)).encode())

    def read_state(self) -> FetcherState | None:
        """Return the last sign of life, of whichever process left it."""
        try:
            return FetcherState(**parse_json_object(self._state.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def ask_for(self, index: int) -> None:
        """Ask whoever fetches to fetch a shard next; repeat it while the shard is wanted."""
        self._asked.mkdir(parents=True, exist_ok=True)
        (self._asked / str(index)).touch()

    def asked_for(self, *, now: float) -> list[int]:
        """Return the shards that were asked for within the last 10 s; forget older ones."""
        found = []
        for path in sorted(self._asked.glob("*")) if self._asked.exists() else []:
            try:
                asked = path.stat().st_mtime
            except FileNotFoundError:  # withdrawn by its rank since it was listed
                continue
            if now - asked < ASK_LASTS_SECONDS:
                found.append(int(path.name))
            else:
                path.unlink(missing_ok=True)
        return found

    def withdraw(self, index: int) -> None:
        """Forget a request: the shard is local now; another rank that waits asks again."""
        (self._asked / str(index)).unlink(missing_ok=True)

    def take_lock(self) -> bool:
        """Become the folder's only fetcher, unless another living process is."""
        return self._lock.acquire()

    def is_led(self) -> bool:
        """Say whether a living process holds the folder: the kernel frees a dead one's lock."""
        try:
            descriptor = os.open(self._lock_path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            # Shared and for an instant: a fetcher that meets it asks again.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release_lock(self) -> None:
        """Let another process fetch; the kernel does it for a process that dies."""
        self._lock.release()
