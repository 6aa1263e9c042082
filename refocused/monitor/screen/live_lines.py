"""Lines that only the live screen shows: bars, and the pages Help, Alarms and Processes."""

import socket
import statistics
from collections.abc import Iterable, Sequence

import psutil
from rich.text import Text

from refocused.monitor.run_reader import RunView
from refocused.monitor.screen.run_lines import alarm_lines
from refocused.system.number_text import moment, value

LONGEST_LINE = 100
_HELP = """\
 q        quit; the run continues
 ?        this help
 a        all alarms, past ones too, and what to do about each
 p        the processes on the GPUs
 r        choose a run
 n        the next run
 z        the newest part of the curves, or all of them
 Escape   leave a page; up, down, PgUp, PgDn scroll it

 at risk  steps since the last checkpoint, which a crash would lose
 mirror   the newest checkpoint in the bucket, and how many wait
 data     shards on this machine, and the next ones that are ready; wait: share
          of a step that waits for data
 link     active NVLinks
 ECC      uncorrected memory errors"""


def gauge_lines(view: RunView, *, width: int, rows: int) -> list[Text]:
    """Return what is known of progress, GPUs, disk and budget as bars, in one row or in two."""
    gpus, systems = view.gpus, view.systems
    busy = [(one.utilization_fraction, 1.0) for one in gpus]
    memory = [(one.memory_used_gib, one.memory_total_gib) for one in gpus or systems]
    free = [(one.disk_free_gib, one.disk_total_gib) for one in systems]
    gauges = {
        "run": _shares([(view.progress_fraction, 1.0)]),
        "GPU": [statistics.fmean(shares)] if (shares := _shares(busy)) else [],
        "GPU mem" if gpus else "RAM": _shares(memory),
        "disk": [1 - share for share in _shares(free)],
        "budget": _shares([(view.cost_usd, view.budget_usd)]),
    }
    known = [(name, max(shares)) for name, shares in gauges.items() if shares]
    return [_gauges(row, width) for row in ([known[:1], known[1:]] if rows > 1 else [known]) if row]


def _shares(pairs: Iterable[tuple[float | None, float | None]]) -> list[float]:
    return [part / whole for part, whole in pairs if part is not None and whole]


def _gauges(gauges: Sequence[tuple[str, float]], width: int) -> Text:
    """Return bars of equal length with their names and figures, together as wide as `width`."""
    line = Text()
    length = max(3, (width - sum(len(name) + 7 for name, _ in gauges)) // len(gauges))
    for name, share in gauges:
        filled = round(min(1.0, max(0.0, share)) * length)
        is_short = share >= 0.8 and name not in ("run", "GPU")
        style = ("red" if share >= 0.95 else "yellow") if is_short else "cyan"
        line.append(f" {name} ").append("\u2588" * filled, style)
        line.append("\u2591" * (length - filled), "dim").append(f" {share:<4.0%}")
    return line


def page_lines(heading: str, view: RunView, *, now: float, width: int) -> list[Text]:
    """Return the page `Alarms`, `Processes` or `Help` at a Unix time."""
    if heading == "Alarms":
        return _alarms(view, now, min(width, LONGEST_LINE)) or [Text(" No alarm was raised.")]
    if heading == "Processes":
        return _processes(view) or [Text(" No process on a GPU is known.")]
    return [Text(line) for line in _HELP.splitlines()]


def _alarms(view: RunView, now: float, width: int) -> list[Text]:
    lines = []
    for alarm in [*view.alarms, *view.past_alarms]:
        live = alarm.ended is None and not view.has_ended
        lines += alarm_lines([alarm], now=now, live=live, width=width)
        times = [moment(one) for one in (alarm.time, alarm.ended) if one is not None]
        since = "since " if alarm.ended is None else ""
        words = f"{'':8}{alarm.name}, {alarm.subject}: {since}{' to '.join(times)}"
        lines += [Text(words, style="dim"), Text()]
    return lines


def _processes(view: RunView) -> list[Text]:
    """Return a line for each process; user and command are known for those of this machine."""
    lines = [Text(f" {'GPU':<4}{'pid':>9}{'GiB':>7}  {'user':<10} command", style="bold")]
    for gpu in view.gpus:
        for pid, gib in (gpu.processes or {}).items():
            user, command = "-", "-"
            try:  # a process may have ended, or run in another container
                if gpu.host == socket.gethostname():
                    process = psutil.Process(int(pid))
                    user, command = process.username(), " ".join(process.cmdline())
            except psutil.Error:
                pass
            row = f" {gpu.index:<4}{pid:>9}{value(gib, '.1f'):>7}  {user:<10.10} {command}"
            lines.append(Text(row if len(view.systems) < 2 else f"{row} ({gpu.host})"))
    return lines if len(lines) > 1 else []
