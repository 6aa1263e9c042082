"""Print results, tables and progress; format and parse numbers."""

import argparse
import contextlib
import decimal
import importlib.util
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from refocused.system.errors import ConfigError, RefocusedError, how_to_install, printable

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
TERMINAL_SECONDS = 0.2
LOG_SECONDS = 10.0


def print_result(record: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a result as JSON or as lines of text."""
    text = json.dumps(record, indent=1, default=str) if as_json else "\n".join(lines)
    print(printable(text))


def table(
    rows: Iterable[Sequence[str]],
    *headings: str,
    numbers: bool = False,
    indent: int = 0,
    file: TextIO | None = None,
) -> list[str]:
    """Return the lines of a table, fitted to the terminal if `file` (None: stdout) is one.

    With `numbers`, columns with a heading are aligned to the right.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    columns = Table(box=None, padding=(0, 3, 0, 0), show_header=bool(headings))
    for heading in headings:
        right = numbers and heading
        columns.add_column(heading, overflow="fold", justify="right" if right else "left")
    for row in rows:
        columns.add_row(*map(printable, row))
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    with console.capture() as captured:
        console.print(Padding(columns, (0, 0, 0, indent), expand=False))
    return [line.rstrip() for line in captured.get().splitlines()]


def setting_text(value: object) -> str:
    """Format a setting's value, nearly as in a run file."""
    if value is None:
        return "null"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return f"{value:.10g}" if isinstance(value, float) else str(value)


@contextlib.contextmanager
def progress_line(
    what: str, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[..., None]]:
    """Yield `show(done_bytes, total_bytes, note="")`, which shows the progress of a transfer.

    A terminal shows a moving line, a log one line every 10 s. Bytes done before the first call do
    not count for the rate.
    """
    from rich.console import Console
    from rich.progress import (
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(file=stream or sys.stderr)
    if not console.is_terminal:
        console.width = 10_000
    progress = Progress(
        TextColumn("{task.description} {task.percentage:5.1f} %", markup=False),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        auto_refresh=False,  # no refreshing thread may exist when workers are forked
        get_time=clock,
        speed_estimate_period=math.inf,
        redirect_stdout=False,
    )
    task = progress.add_task(what, total=None, note="")
    pause = TERMINAL_SECONDS if console.is_terminal else LOG_SECONDS
    shown = clock() - (TERMINAL_SECONDS if console.is_terminal else 0)

    def show(done_bytes: int, total_bytes: int, note: str = "") -> None:
        nonlocal shown
        progress.update(task, completed=done_bytes, total=total_bytes, note=note)
        if clock() - shown < pause:
            return
        shown = clock()
        if not console.is_terminal:
            console.print(progress.get_renderable())
        elif progress.live.is_started:
            progress.refresh()
        else:
            progress.start()

    try:
        yield show
    finally:
        if progress.live.is_started:
            progress.stop()


def check_picture(file: Path | None, *, option: str = "--picture") -> None:
    """Raise ConfigError if the picture to write is not a PNG, or nothing can draw it."""
    if file is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{option} needs matplotlib. Install it: {how_to_install('matplotlib')}")
    if file is not None and file.suffix.lower() != ".png":
        raise ConfigError(f"{option} {file}: the name must end in .png.")


def write_picture(draw: Callable[[Path], object], file: Path, *, option: str = "--picture") -> None:
    """Draw a picture into a file; raise RefocusedError if it cannot be written."""
    try:
        draw(file)
    except OSError as error:
        raise RefocusedError(
            f"{file} cannot be written ({error.strerror}). Name another file with {option}."
        ) from None


def count(text: str) -> int:
    """Parse a whole number of at least 1: `100000000`, `100_000_000`, `1e8` or `100M`."""
    whole = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*"
    match = re.fullmatch(rf"((?:{whole})\.?[0-9]*(?:e[0-9][0-9]?[0-9]?)?)([kmbgt]?)", text.lower())
    number = decimal.Decimal(0)
    if match is not None:
        number = decimal.Decimal(re.sub("[_,]", "", match[1])) * _FACTORS[match[2]]
    if not 1 <= number < 2**63 or number % 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a whole number of at least 1, such as 8 or 1e8"
        )
    return int(number)


def ratio(text: str) -> float:
    """Parse a share from 0 to 1."""
    share = _float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share from 0 to 1, such as 0.01")
    return share


def positive(text: str) -> float:
    """Parse a number above 0."""
    number = _float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return number


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
