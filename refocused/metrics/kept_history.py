"""The end of a run's loss history, kept in every step so that it comes along to another machine."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

HISTORY = "training_metrics.jsonl"
MOST_BYTES = 4 * 1024 * 1024  # some 10,000 lines


def end_of(file: Path) -> bytes | None:
    """Return the last whole lines of a file of JSON lines; None: there are none.

    Raises:
        OSError: It cannot be read.
    """
    try:
        with file.open("rb") as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(0, size - MOST_BYTES - 1))
            content = lines.read()
    except FileNotFoundError:
        return None
    if size > MOST_BYTES:
        content = content.partition(b"\n")[2]
    return content[: content.rfind(b"\n") + 1] or None


def bring_back(kept: Path, file: Path, *, step: int) -> bool:
    """Begin an empty or missing file with the end that a step keeps; return whether that was done.

    A disk that does not take it costs the history alone, and a warning.
    """
    if file.exists() and file.stat().st_size:
        return False
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as lines:  # who has it open appends behind
            lines.write(kept.read_bytes())
    except OSError as error:
        logger.warning("The losses before step %d are not in %s: %s.", step, file, error)
        return False
    return True
