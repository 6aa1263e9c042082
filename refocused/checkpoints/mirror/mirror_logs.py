"""Copy a machine's logs to the bucket, so that a lost machine does not take them along."""

import contextlib
import socket
import time
from pathlib import Path

from refocused.bucket.bucket import Bucket
from refocused.checkpoints.mirror.mirror_status import MirrorSettings
from refocused.metrics.history import end_of
from refocused.system.errors import BucketError

COPY_SECONDS = 60.0
END_SECONDS = 60.0  # longest wait for training to write its last lines


class LogCopier:
    """Copies changed logs once a minute to `RUN/logs/HOST/`, each by its last 4 MiB.

    A failure is left to the next minute: it never delays or disturbs training.
    """

    def __init__(self, bucket: Bucket, settings: MirrorSettings) -> None:
        """Prepare, without a request."""
        self._bucket, self._settings = bucket, settings
        self._below = f"{settings.prefix.rpartition('/')[0]}/logs/{socket.gethostname()}".strip("/")
        self._sent: dict[Path, int] = {}  # modification times, in ns
        self._due = 0.0

    def copy(self) -> None:
        """Copy what has changed, if that is due."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + COPY_SECONDS
        run = self._settings.run
        for path in (run / "state.json", run / "run.yaml", *sorted((run / "logs").glob("*"))):
            with contextlib.suppress(BucketError, OSError):
                changed = path.stat().st_mtime_ns
                if path.name != "mirror.log" and self._sent.get(path) != changed:
                    name = f"{self._below}/{path.name}"
                    self._bucket.write(name, end_of(path) or b"", overwrite=True)
                    self._sent[path] = changed

    def finish(self) -> None:
        """Copy the last lines, which training writes after the mirror has finished its queue."""
        until = time.monotonic() + END_SECONDS
        while self._settings.training.alive and time.monotonic() < until:
            time.sleep(0.1)
        self._due = 0.0
        self.copy()
