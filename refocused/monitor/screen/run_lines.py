"""A run as lines of text, for one print and for the live screen."""

import datetime
import re
import textwrap
from collections.abc import Sequence

from rich.text import Text

from refocused.metrics.expected_loss import expected_text
from refocused.metrics.history import StepMetrics
from refocused.monitor.readings import GpuSample
from refocused.monitor.run_reader import Alarm, RunView, Status
from refocused.monitor.screen.pictures import columns
from refocused.system.errors import counted
from refocused.system.number_text import count_text, dollars, duration, known, moment, value

TROUBLE_ROWS = 3  # for the reason of a failure
STALE_SAMPLE_SECONDS = 60.0
STATUS_STYLES: dict[Status, str] = {
    "starting": "cyan",
    "training": "bold green",
    "finished": "bold green",
    "stopped": "yellow",
    "silent": "bold yellow",
    "failed": "bold red",
    "crashed": "bold red",
    "unknown": "yellow",
}
_TROUBLES: tuple[Status, ...] = ("failed", "unknown")  # whose notes are sentences
_GPU_ROW = " {:<3} {:>4}  {:>11}  {:>4}  {:>7}  {:>9}  {:>5}  {:>3}  "
_GPU_HEAD = _GPU_ROW.format("GPU", "util", "memory GB", "temp", "power W", "SM MHz", "link", "ECC")
_HEIGHTS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"  # of a sparkline
_ASCII_BARS = str.maketrans("\u2591" + _HEIGHTS, "._.:-=+*#")
HISTORY_COLUMNS = 15
_THROTTLES = {  # the worst first
    "hw_thermal": "HW THERMAL",
    "hw_power_brake": "POWER BRAKE",
    "sw_thermal": "THERMAL",
    "hw_slowdown": "HW SLOWDOWN",
}


def all_lines(view: RunView, *, events: int) -> list[Text]:
    """Return all lines, for one print."""
    return [
        *head_lines(view),
        *alarm_lines(view, view.alarms),
        *gpu_lines(view),
        *event_lines(view, count=events),
    ]


def head_lines(view: RunView, *, width: int | None = None) -> list[Text]:
    """Return run, figures, cost, checkpoints, data, ranks, machine; wrap errors at `width`."""
    silent = "" if view.silent_seconds is None else f"{duration(view.silent_seconds)} ago"
    total = known("/{:,} {:.1%}", view.total_steps or None, view.progress_fraction)
    code = "" if view.is_live else known("  exit code {}", view.exit_code)
    line = Text().append(f" {view.name}  ", "bold")
    line.append(view.status.upper(), STATUS_STYLES[view.status])
    line.append(f" {silent}" if view.has_ended and silent else "")
    line.append(f"  step {view.step:,}{total}{code}")
    if view.note and view.status not in _TROUBLES:
        line.append(f"  {view.note}")
    elif view.is_live and silent:
        line.append(f"  last line {silent}", style="dim")
    lines = [line]
    if view.note and view.status in _TROUBLES:
        rows = _wrapped(view.note, None if width is None else width - 1)
        if len(rows) > TROUBLE_ROWS:  # the last row is cut at the edge, with a mark
            rows = [*rows[: TROUBLE_ROWS - 1], " ".join(rows[TROUBLE_ROWS - 1 :])]
        lines += [Text(f" {row}", style=STATUS_STYLES[view.status]) for row in rows]
    last, best, used = view.last_step or StepMetrics(0), "", view.used
    if view.best_loss is not None:
        bits = known(" ({:.4f} bits/byte)", view.best_bits_per_byte)
        best = f"best val {view.best_loss:.4f}{bits} at {view.best_step or 0:,}"
    quality = _line(
        f"loss {value(view.loss, '.4f')}",
        best,
        known("lr {:.2e}", last.learning_rate),
        known("gnorm {:.2f}", last.gradient_norm),
    )
    speed = _line(
        known("{:.3g} s/step", last.step_seconds),
        known("{:,.0f} tok/s", last.tokens_per_second),
        known("MFU {:.1%}", last.mfu_fraction),
        used.as_line() if used is not None and used.goodput_fraction is not None else "",
    )
    lines.append(quality)
    expectation = expected_text(view.expected_loss, view.steps)
    if expectation and "reason" not in (view.expected_loss or {}):
        lines.append(Text(f" expected {expectation}", style="dim"))
    if speed.plain.strip():
        lines.append(speed)
    left = ""
    if view.seconds_left is not None:
        left = f"left {duration(view.seconds_left)}{dollars(view.cost_left_usd)}"
        if view.resumes_from is not None:
            begin = f"checkpoint {view.resumes_from:,}" if view.resumes_from else "the start"
            left += f" from {begin}"
    money = _line(
        f"elapsed {duration(view.seconds_trained)}{dollars(view.cost_usd)}"
        + known(" of ${:,.0f}", view.budget_usd),
        left,
        "" if view.ends is None else f"ends {moment(view.ends)}",
    )
    lines += [money, _saves_line(view)]
    if view.mirror is not None and view.mirror.last_error:
        lines.append(Text(f" mirror error: {view.mirror.last_error}", style="red"))
    shards, local = view.shards, ""
    if shards is not None:
        total = counted(shards["total"], "shard")
        local = f"{shards['local']:,}/{total} local, next {shards['ready']:,} ready"
    wait = known("wait {:.1%}", last.data_wait_fraction)
    data = _line(local, wait, f"{count_text(view.tokens)} tokens trained on" if view.tokens else "")
    if data.plain.strip():
        lines.append(Text(" data").append_text(data))
    if (slowest := last.slowest) is not None and slowest.is_slow:
        excess = f"slowest: {slowest.place} +{slowest.excess_fraction:.1%} ({slowest.phase})"
        lines.append(Text.assemble(" ranks ", (excess, "yellow")))
    parts = []
    for system in view.systems:
        taken, size = system.memory_used_gb, system.memory_total_gb
        parts += [
            f"{system.host}:" if len(view.systems) > 1 else "",
            known("CPU {:.0%}", system.cpu_fraction),
            "" if taken is None or size is None else f"RAM {taken:,.0f}/{size:,.0f} GB",
            known("disk {:,.0f} GB free", system.disk_free_gb),
        ]
    parts.append(known("GPU peak {:.0%}", last.gpu_memory_fraction))
    machine = _line(*parts) if any(parts) else Text(" no readings of the machine")
    if age := _stale_text(view.samples_age_seconds):
        machine = Text.assemble((f" {age}:", "yellow" if view.is_live else "dim"), machine)
    return [*lines, machine]


def folded(line: Text, width: int) -> list[Text]:
    """Break a line between its figures where it is wider than `width`."""
    breaks = [0]
    for figure in re.finditer(r"\S.*?(?=  | \||$)", line.plain):
        if figure.end() - breaks[-1] > width:
            breaks += [figure.start() - 1]
    return list(line.divide(breaks[1:]))


def _wrapped(words: str, width: int | None) -> list[str]:
    return textwrap.wrap(words, max(20, width)) if width is not None else [words]


def _line(*parts: str) -> Text:
    return Text(" " + "  ".join(part for part in parts if part))


def _saves_line(view: RunView) -> Text:
    saves, mirror = view.saves, view.mirror
    is_bare = saves.newest_step is None and view.step > 0
    newest = known("{:,}", saves.newest_step) or "nothing"
    line = Text(" saved ").append(newest, style="yellow" if is_bare else "")
    if saves.steps_at_risk:
        fate, lost = "lost" if view.has_ended else "at risk", saves.seconds_at_risk
        span = "" if lost is None else f" = {duration(lost)}"
        line.append(f"  {fate} {counted(saves.steps_at_risk, 'step')}{span}")
    if mirror is None:
        return line.append("  no mirror", style="dim")
    line.append("  mirror " + (known("{:,}", mirror.newest_step) or "empty"))
    if mirror.waiting:
        line.append(f", {mirror.waiting} behind", style="yellow" if mirror.last_error else "")
        line.append(known(" ({:.0%})", mirror.uploading_fraction))
    if mirror.failed:
        line.append(f", {mirror.failed} cannot be copied", style="red")
    return line


def _stale_text(age_seconds: float | None) -> str:
    is_stale = age_seconds is not None and age_seconds > STALE_SAMPLE_SECONDS
    return f"{duration(age_seconds)} ago" if is_stale else ""


def gpu_lines(view: RunView) -> list[Text]:
    """Return the table of GPUs, or one line that states why there is none."""
    if not view.gpus:
        notes = [system.gpu_note for system in view.systems if system.gpu_note]
        return [Text(f" {notes[0] if notes else 'no GPU readings'}", style="dim")]
    head = Text(
        _GPU_HEAD + (_stale_text(view.samples_age_seconds) or "note, recent util"), style="bold"
    )
    lines, is_shared = [head], len({gpu.host for gpu in view.gpus}) > 1
    for gpu in view.gpus:
        host, trouble = f"{gpu.host} " * is_shared, gpu_trouble(gpu)
        if gpu.lost:
            text = f" {gpu.index:<3} LOST   {trouble} {host}"
            lines.append(Text(text, style="bold red"))
            continue
        row = _GPU_ROW.format(
            gpu.index,
            value(gpu.utilization_fraction, ".0%"),
            f"{value(gpu.memory_used_gb, '.1f')}/{value(gpu.memory_total_gb, '.1f')}",
            f"{value(gpu.temperature_celsius, '.0f')} C",
            f"{value(gpu.power_watts, '.0f')}/{value(gpu.power_limit_watts, '.0f')}",
            f"{value(gpu.sm_clock_mhz, '.0f')}/{value(gpu.sm_clock_max_mhz, '.0f')}",
            f"{value(gpu.nvlinks_active, '.0f')}/{value(gpu.nvlinks_total, '.0f')}",
            value(gpu.ecc_uncorrected, ".0f"),
        )
        identity = gpu.host, gpu.index
        past = [
            reading for reading in view.gpu_history if (reading.host, reading.index) == identity
        ]
        name = "utilization_fraction"
        busy = columns(past, name, most=HISTORY_COLUMNS).get(name, [])
        bars = "".join(" " if share is None else _HEIGHTS[min(7, int(share * 8))] for share in busy)
        note = f"{trouble} " if trouble else ""
        lines.append(Text.assemble(row, (note, "bold red"), (host, "dim"), (bars, "cyan")))
    return lines


def gpu_trouble(gpu: GpuSample) -> str:
    """Return the known faults of a GPU in a few words; empty: none."""
    reasons = gpu.throttle_reasons or ()
    troubles = [words for name, words in _THROTTLES.items() if name in reasons][:1]
    if gpu.lost:
        troubles.insert(0, "fallen off the bus")
    if gpu.ecc_uncorrected:
        troubles.append("memory errors")
    if gpu.remap_failed or gpu.remap_pending:
        troubles.append("row remap failed" if gpu.remap_failed else "row remap pending")
    return "; ".join(troubles)


def alarm_lines(
    view: RunView, alarms: Sequence[Alarm], *, width: int | None = None, short: bool = False
) -> list[Text]:
    """Return a line for each alarm of a run, wrapped at `width` characters.

    Those that are over or whose run has ended are history. If `short`, leave out the advice.
    """
    lines = []
    for alarm in alarms:
        is_history = alarm.ended is not None or view.has_ended
        style = "dim" if is_history else "bold red" if alarm.critical else "bold yellow"
        label = " ALARM " if alarm.critical else " WARN  "
        since = "" if alarm.time is None else f"{duration(max(0.0, view.now - alarm.time))}  "
        words = since + alarm.text if short else f"{since}{alarm.text} {alarm.advice}".rstrip()
        first, *others = _wrapped(words, None if width is None else width - 8)
        reverse = "reverse " * (alarm.critical and not is_history)
        lines.append(Text.assemble((label, reverse + style), (f" {first}", style)))
        lines += [Text(f"{'':8}{row}", style=style) for row in others]
    return lines


def event_lines(view: RunView, *, count: int, width: int | None = None) -> list[Text]:
    """Return the last events in so many lines, the newest last, wrapped at `width` while they fit.

    Why there are no readings of GPUs is left out: it stands where their table would.
    """
    notes = [] if view.gpus else [system.gpu_note for system in view.systems]
    lines: list[Text] = []
    for event in reversed([event for event in view.events if event.text not in notes]):
        clock = "--:--:--"
        if event.time is not None:
            clock = f"{datetime.datetime.fromtimestamp(event.time, datetime.UTC):%H:%M:%S}"
        style = "yellow" if event.is_trouble else ""
        first, *others = _wrapped(event.text, None if width is None else width - 10)
        if len(lines) + 1 + len(others) > count:
            first, others = event.text, []
        rows = [Text.assemble((f" {clock} ", "dim"), (first, style))]
        rows += [Text(f"{'':10}{row}", style=style) for row in others]
        lines = [*rows, *lines][-count:]
    return lines


def run_rows(views: Sequence[RunView]) -> list[Text]:
    """Return one line per run."""
    width, rows = max((len(view.name) for view in views), default=0), []
    for view in views:
        step = f"step {view.step:,}" + (f"/{view.total_steps:,}" if view.total_steps else "")
        figures = _line(
            step,
            f"loss {value(view.loss, '.4f')}",
            "" if view.seconds_left is None else f"left {duration(view.seconds_left)}",
            view.note if view.status in _TROUBLES else "",
        )
        status = (f"{view.status:<8} ", STATUS_STYLES[view.status])
        rows.append(Text.assemble(f" {view.name:<{width}}  ", status, figures))
    return rows


def shown(lines: Sequence[Text], *, ascii_only: bool) -> list[Text]:
    """Replace characters that could control a terminal: names may contain anything."""
    for line in lines:
        line.plain = "".join(
            sign if sign.isprintable() and (sign.isascii() or not ascii_only) else "?"
            for sign in (line.plain.translate(_ASCII_BARS) if ascii_only else line.plain)
        )
    return list(lines)


def fitted(line: Text, width: int, *, ascii_only: bool) -> Text:
    """Cut a line at `width` (0: unknown), with a mark: half a number would mislead."""
    if not width or line.cell_len <= width:
        return line
    mark = "..." if ascii_only else "\u2026"
    line.truncate(max(0, width - len(mark)))
    return line.append(mark)
