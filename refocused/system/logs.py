"""Messages on the terminal, which begin with a level, and logging to it and to files."""

import contextlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TextIO

from refocused.system.errors import printable, short_reason

root = logging.getLogger("refocused")
PAUSE_SECONDS = 0.2  # between two drawings of the progress bar
Level = Literal["error", "warning", "hint"]


def with_level(level: Level | None, text: str) -> str:
    """Begin each line of a message with its level, as ruff and uv do, except indented details."""
    if level is None:
        return text
    lines = text.split("\n")
    return "\n".join(f"{level}: {row}" if row and not row[0].isspace() else row for row in lines)


def print_message(level: Level | None, text: str) -> None:
    """Print a message to stderr, in place of a progress bar; a closed terminal does not matter."""
    try:
        print(f"{erasure(sys.stderr)}{with_level(level, text)}", file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def erasure(stream: TextIO) -> str:
    """Return what removes a progress bar before a line; nothing if there is no terminal."""
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return "\r\x1b[2K" if is_terminal else ""


class ProgressBar:
    """A bar below the log lines; it has no line end, so that the next line replaces it."""

    def __init__(
        self,
        stream: TextIO,
        total_steps: int,
        left: Callable[[int], str],  # how much is left after a step, in words
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._stream, self._console = stream, Console(file=stream)
        self._left, self._clock = left, clock
        text = TextColumn("{task.percentage:.1f}% | {task.description}")
        steps, bar = TextColumn("step {task.completed:,}/{task.total:,}"), BarColumn(bar_width=None)
        self._progress = Progress(steps, bar, text, console=self._console, expand=True)
        self._task = self._progress.add_task("", total=total_steps)
        self._shown_at = clock() - PAUSE_SECONDS

    def show(self, step: int) -> None:
        """Draw the bar after a step, unless that was done a moment ago."""
        if self._clock() - self._shown_at < PAUSE_SECONDS:
            return
        self._shown_at = self._clock()
        self._progress.update(self._task, completed=step, description=self._left(step))
        with self._console.capture() as drawn:
            # A full line would move the cursor to the next one.
            self._console.print(self._progress.get_renderable(), width=self._console.width - 1)
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._stream.write(erasure(self._stream) + drawn.get().rstrip("\n"))
            self._stream.flush()


class ScreenFormatter(logging.Formatter):
    """Message only; warnings and errors begin with their level, those of other ranks name them.

    An exception is shown with its traceback: whole while there is no log file to read it in.
    """

    def __init__(self, stream: TextIO, rank: int = 0) -> None:
        super().__init__()
        self._begin, self._rank = erasure(stream), f"rank {rank}: " if rank else ""

    def format(self, record: logging.LogRecord) -> str:
        """Return what the terminal shows of a record."""
        levels: dict[int, Level] = {logging.WARNING: "warning", logging.ERROR: "error"}
        text = f"{self._rank}{record.getMessage()}"
        text = with_level(levels.get(record.levelno), text)
        if record.exc_info:
            files = [log.baseFilename for log in root.handlers if isinstance(log, _LogFile)]
            frames = traceback.format_exception(record.exc_info[1], limit=-5 if files else None)
            text = f"{text}\n{''.join(frames)}" + "".join(f"All frames: {log}" for log in files[:1])
        return f"{self._begin}{printable(text.rstrip())}"


class _LogFile(logging.FileHandler):
    """Drops lines on a full disk, without a traceback on the terminal for each."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def start_screen(rank: int) -> None:
    """Log to the terminal on rank 0: results to stdout, warnings and errors to stderr.

    Of other ranks only exceptions are shown.
    """
    _reset_root()
    out, err = logging.StreamHandler(sys.stdout), logging.StreamHandler(sys.stderr)
    out.addFilter(lambda record: record.levelno < logging.WARNING and rank == 0)
    err.addFilter(lambda record: record.exc_info is not None or rank == 0)
    err.setLevel(logging.WARNING)
    for handler in (out, err):
        handler.setFormatter(ScreenFormatter(handler.stream, rank))
        root.addHandler(handler)
    for name in ("DeepSpeed", "torch", "transformers", "google", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)


def start_files(folder: Path, rank: int) -> None:
    """Also log to `rank-N.log` in `folder`, and on rank 0 to `training.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in [f"rank-{rank}.log"] + (["training.log"] if rank == 0 else []):
        _log_to(folder / name, process=f"rank {rank}")


def log_unexpected(error: BaseException, where: str = "") -> None:
    """Log an error that nothing has foreseen, with its traceback."""
    root.error("Unexpected %s%s", short_reason(error), where, exc_info=error)


def start_process_log(process: str, file: Path) -> None:
    """Log only to a file, from a process that is not a rank; its name starts each line."""
    _reset_root()
    _log_to(file, process=process)


def _reset_root() -> None:
    root.setLevel(logging.INFO)
    root.propagate = False
    root.handlers.clear()


def _log_to(file: Path, *, process: str) -> None:
    """Log to a file: each line starts with the UTC time, the process and the level."""
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ {process} %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = _LogFile(file, encoding="utf-8")
    handler.setFormatter(formatter)
    root.addHandler(handler)
