"""One start at a time trains a run: a second one waits for the first to end, or is refused."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from refocused.system.errors import TrainingError
from refocused.system.locks import FileLock

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0  # ranks whose launcher was killed need some to notice, save and end
_POLL_SECONDS = 0.2


def claim_run(folder: Path, *, patience_seconds: float = PATIENCE_SECONDS) -> FileLock:
    """Take a run's folder for this process until it ends, however it ends.

    Two starts of one run would set each other's steps aside and mix their records.

    Args:
        folder: The run's folder.
        patience_seconds: How long to wait for another start to end, in seconds.

    Returns:
        The lock, which is held as long as the process lives.

    Raises:
        TrainingError: Another process is still training it.
    """
    lock = FileLock(folder / "run.lock")
    if lock.acquire():
        return lock
    logger.warning(
        "%s is being trained by another process; waiting up to %.0f s for it to end",
        folder,
        patience_seconds,
    )
    deadline = time.monotonic() + patience_seconds
    while not lock.acquire():
        if time.monotonic() >= deadline:
            raise TrainingError(
                f"{folder} is being trained by another process, which still holds "
                f"{folder / 'run.lock'}. Wait until it has ended or stop it (python "
                f"launch/stop.py {folder}), or give this run another name (run.name=...)."
            )
        time.sleep(_POLL_SECONDS)
    return lock
