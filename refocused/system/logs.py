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
        text = record.getMessage()
        if record.levelno >= logging.ERROR:
            return f"ERROR {text}"
        if record.levelno >= logging.WARNING:
            return f"WARN  {text}"
        return text


class _FileFormatter(logging.Formatter):
    """UTC time, who says it and level before each message."""

    converter = staticmethod(time.gmtime)

    def __init__(self, who: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03dZ {who} %(levelname)s %(message)s")
        self.datefmt = "%Y-%m-%dT%H:%M:%S"


class _LogFile(logging.FileHandler):
    """A file that loses lines when its disk is full, without a traceback for each on the screen."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def start_screen(rank: int) -> None:
    """Send log lines to the screen: results on stdout, warnings on stderr, of rank 0 alone."""
    root = logging.getLogger(LOGGER_NAME)
    root.setLevel(logging.INFO)
    root.propagate = False
    root.handlers.clear()
    root.addHandler(logging.NullHandler())  # without any, Python prints warnings by itself
    if rank == 0:
        out = logging.StreamHandler(sys.stdout)
        out.addFilter(lambda record: record.levelno < logging.WARNING)
        err = logging.StreamHandler(sys.stderr)
        err.setLevel(logging.WARNING)
        for handler in (out, err):
            handler.setFormatter(_ScreenFormatter())
            root.addHandler(handler)
    quieten_libraries()


def start_files(folder: Path, rank: int) -> None:
    """Also write `rank-N.log`, and on rank 0 `training.log`, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"rank-{rank}.log"] + (["training.log"] if rank == 0 else [])
    for name in names:
        _write_to(folder / name, who=f"rank {rank}")


def start_file_of(who: str, file: Path) -> None:
    """Write a file, and nothing else, from a process that is no rank; `who` opens its lines."""
    root = logging.getLogger(LOGGER_NAME)
    root.setLevel(logging.INFO)
    root.propagate = False
    root.handlers.clear()
    _write_to(file, who=who)


def _write_to(file: Path, *, who: str) -> None:
    handler = _LogFile(file, encoding="utf-8")
    handler.setFormatter(_FileFormatter(who))
    logging.getLogger(LOGGER_NAME).addHandler(handler)


def quieten_libraries() -> None:
    """Keep the libraries' own chatter below warnings off the screen."""
    for name in ("DeepSpeed", "torch", "transformers", "google", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
