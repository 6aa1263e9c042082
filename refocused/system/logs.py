"""Log lines: the screen of rank 0, `training.log`, and one file a rank."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

LOGGER_NAME = "refocused"


class _ScreenFormatter(logging.Formatter):
    """Bare lines for a person; warnings carry their level."""

    def format(self, record: logging.LogRecord) -> str:
        marks = {logging.WARNING: "WARN  ", logging.ERROR: "ERROR "}
        return f"{marks.get(record.levelno, '')}{record.getMessage()}"


class _LogFile(logging.FileHandler):
    """A file that loses lines when its disk is full, without a traceback for each on the screen."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def start_screen(rank: int) -> None:
    """Send log lines to the screen: results on stdout, warnings on stderr, of rank 0 alone."""
    root = _fresh_root()
    root.addHandler(logging.NullHandler())  # without any, Python prints warnings by itself
    if rank == 0:
        out = logging.StreamHandler(sys.stdout)
        out.addFilter(lambda record: record.levelno < logging.WARNING)
        err = logging.StreamHandler(sys.stderr)
        err.setLevel(logging.WARNING)
        for handler in (out, err):
            handler.setFormatter(_ScreenFormatter())
            root.addHandler(handler)
    for name in ("DeepSpeed", "torch", "transformers", "google", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)


def start_files(folder: Path, rank: int) -> None:
    """Also write `rank-N.log`, and on rank 0 `training.log`, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in [f"rank-{rank}.log"] + (["training.log"] if rank == 0 else []):
        _write_to(folder / name, who=f"rank {rank}")


def start_file_of(who: str, file: Path) -> None:
    """Write a file, and nothing else, from a process that is no rank; `who` opens its lines."""
    _fresh_root()
    _write_to(file, who=who)


def _fresh_root() -> logging.Logger:
    root = logging.getLogger(LOGGER_NAME)
    root.setLevel(logging.INFO)
    root.propagate = False
    root.handlers.clear()
    return root


def _write_to(file: Path, *, who: str) -> None:
    """Open each line with the UTC time, `who` and the level."""
    form = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ {who} %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    form.converter = time.gmtime
    handler = _LogFile(file, encoding="utf-8")
    handler.setFormatter(form)
    logging.getLogger(LOGGER_NAME).addHandler(handler)
