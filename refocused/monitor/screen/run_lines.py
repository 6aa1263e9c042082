"""What a person reads of a run, as lines: the same ones for one print and for the live screen."""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import Sequence

from rich.text import Text

from refocused.metrics.step_metrics import dollars, duration
from refocused.monitor.readings import SystemSample
from refocused.monitor.run_status import Alarm, Event, RunView, Status
from refocused.monitor.screen.dashboard_gpus import gpu_lines
from refocused.monitor.screen.dashboard_words import (
    moment,
    percent,
    stale_text,
    time_text,
    tokens_text,
    value,
)

TROUBLE_ROWS = 3  # of what a run failed with
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


def head_lines(view: RunView, *, width: int | None = None) -> list[Text]:
    """Return the run, its figures, its time and money, what is saved, its data, the machine.

    Args:
        view: The run.
        width: Characters of a line, at which sentences go on in the next; None: no limit.
    """
    return [
        _run_line(view),
        *_trouble_lines(view, width),
        _figures_line(view),
        _money_line(view),
        _saves_line(view),
        *_mirror_error_lines(view),
        *_data_lines(view),
        _machine_line(view),
    ]


def _run_line(view: RunView) -> Text:
    line = Text(f" {view.name}  ", style="bold").append(
        view.status.upper(), style=STATUS_STYLES[view.status]
    )
    silent = None if view.silent_seconds is None else f"{duration(view.silent_seconds)} ago"
    if view.has_ended and silent is not None:
        line.append(f" {silent}", style="not bold")
    line.append(f"  step {view.step:,}", style="not bold")
    if view.total_steps:
        line.append(f"/{view.total_steps:,} {percent(view.progress_fraction)}", style="not bold")
    if view.exit_code is not None and not view.is_live:
        line.append(f"  exit code {view.exit_code}", style="not bold")
    if view.note and view.status not in _TROUBLES:
        line.append(f"  {view.note}", style="not bold")
    elif view.is_live and silent is not None:
        line.append(f"  last line {silent}", style="not bold dim")
    return line


def _trouble_lines(view: RunView, width: int | None) -> list[Text]:
    """Return what is too long to stand behind the status."""
    if not view.note or view.status not in _TROUBLES:
        return []
    rows = _rows(view.note, None if width is None else width - 1)
    if len(rows) > TROUBLE_ROWS:  # the last one is cut at the edge, visibly
        rows = [*rows[: TROUBLE_ROWS - 1], " ".join(rows[TROUBLE_ROWS - 1 :])]
    return [Text(f" {row}", style=STATUS_STYLES[view.status]) for row in rows]


def _rows(words: str, width: int | None) -> list[str]:
    return textwrap.wrap(words, max(20, width)) if width is not None else [words]


def _figures_line(view: RunView) -> Text:
    last, parts = view.last_step, [f"loss {value(view.loss, '.4f')}"]
    if view.best_loss is not None:
        parts.append(f"best val {view.best_loss:.4f} at {view.best_step or 0:,}")
    if last is not None:
        parts.append(f"{value(last.step_seconds, '.3g')} s/step")
        parts.append(f"{value(last.tokens_per_second, ',.0f')} tok/s")
        if last.mfu_fraction is not None:
            parts.append(f"MFU {percent(last.mfu_fraction)}")
        parts.append(f"lr {value(last.learning_rate, '.2e')}")
        if last.gradient_norm is not None:
            parts.append(f"gnorm {last.gradient_norm:.2f}")
    return Text(" " + "  ".join(parts))


def _money_line(view: RunView) -> Text:
    parts = [f"elapsed {time_text(view.seconds_trained)}{dollars(view.cost_usd)}"]
    if view.budget_usd is not None:
        parts[0] += f" of ${view.budget_usd:,.0f}"
    if view.seconds_left is not None:
        begin = "" if view.resumes_from is None else f" from {_checkpoint(view.resumes_from)} on"
        parts.append(f"left {duration(view.seconds_left)}{dollars(view.cost_left_usd)}{begin}")
    if view.ends is not None:
        parts.append(f"ends {moment(view.ends)}")
    return Text(" " + "  ".join(parts))


def _saves_line(view: RunView) -> Text:
    saves, line = view.saves, Text(" saved ")
    if saves.newest_step is None:
        line.append("nothing", style="yellow" if view.step else "")
    else:
        line.append(f"{saves.newest_step:,}")
    if saves.steps_at_risk:
        fate = "lost" if view.has_ended else "at risk"
        line.append(f"  {fate} {saves.steps_at_risk:,} steps{_equals(saves.seconds_at_risk)}")
    mirror = view.mirror
    if mirror is None:
        return line.append("  no mirror", style="dim")
    line.append("  mirror ")
    line.append("empty" if mirror.newest_step is None else f"{mirror.newest_step:,}")
    if mirror.waiting:
        line.append(f", {mirror.waiting} behind", style="yellow" if mirror.last_error else "")
        if mirror.uploading_fraction is not None:
            line.append(f" ({mirror.uploading_fraction:.0%})")
    if mirror.failed:
        line.append(f", {mirror.failed} cannot be copied", style="red")
    return line


def _mirror_error_lines(view: RunView) -> list[Text]:
    if view.mirror is None or not view.mirror.last_error:
        return []
    return [Text(f" mirror's last error: {view.mirror.last_error}", style="red")]


def _data_lines(view: RunView) -> list[Text]:
    shards, last, parts = view.shards, view.last_step, []
    if shards is not None:
        parts.append(f"{shards.local:,}/{shards.total:,} shards local, next {shards.ready:,} ready")
    if last is not None and last.data_wait_fraction is not None:
        parts.append(f"wait {percent(last.data_wait_fraction)}")
    if view.tokens:
        parts.append(f"{tokens_text(view.tokens)} trained on")
    return [Text(" data " + "  ".join(parts))] if parts else []


def _machine_line(view: RunView) -> Text:
    last = view.last_step
    parts = [_system_text(system, named=len(view.systems) > 1) for system in view.systems]
    if last is not None and last.gpu_memory_fraction is not None:
        parts.append(f"GPU peak {last.gpu_memory_fraction:.0%}")
    line = Text(" ")
    if age := stale_text(view.samples_age_seconds):
        line.append(f"{age}: ", style="yellow" if view.is_live else "dim")
    return line.append("  ".join(parts or ["no samples of the machine"]))


def _system_text(system: SystemSample, *, named: bool) -> str:
    parts = [f"{system.host}:"] if named else []
    if system.cpu_fraction is not None:
        parts.append(f"CPU {system.cpu_fraction:.0%}")
    if system.memory_used_gib is not None and system.memory_total_gib is not None:
        parts.append(f"RAM {system.memory_used_gib:,.0f}/{system.memory_total_gib:,.0f} GiB")
    if system.disk_free_gib is not None:
        parts.append(f"disk {system.disk_free_gib:,.0f} GiB free")
    return "  ".join(parts)


def alarm_lines(
    alarms: Sequence[Alarm], *, now: float, live: bool, width: int | None = None
) -> list[Text]:
    """Return a line for each alarm; of a run that has ended they are history.

    Args:
        alarms: The critical ones first.
        now: Unix seconds.
        live: Whether the run may still be helped.
        width: Characters of a line, at which an alarm goes on in the next; None: no limit.
    """
    lines = []
    for alarm in alarms:
        label = Text(f" {'ALARM' if alarm.critical else 'WARN '} ", style=_alarm_style(alarm, live))
        room = None if width is None else width - label.cell_len - 1
        first, *others = _rows(f"{_since(alarm, now)}{alarm.text}", room)
        lines.append(label.append(f" {first}", style="not reverse"))
        lines += [
            Text(f"{'':8}{row}", style=_alarm_style(alarm, live, label=False)) for row in others
        ]
    return lines


def _alarm_style(alarm: Alarm, live: bool, *, label: bool = True) -> str:
    if not live:
        return "dim"
    if not alarm.critical:
        return "bold yellow"
    return "bold reverse red" if label else "bold red"


def _since(alarm: Alarm, now: float) -> str:
    return "" if alarm.time is None else f"{duration(max(0.0, now - alarm.time))}  "


def event_lines(events: Sequence[Event], *, count: int) -> list[Text]:
    """Return the last events, the newest below."""
    shown = list(events)[-count:] if count > 0 else []
    return [
        Text(f" {_clock(event.time)} ", style="dim").append(
            event.text, style="not dim yellow" if event.is_trouble else "not dim"
        )
        for event in shown
    ]


def run_rows(views: Sequence[RunView]) -> list[Text]:
    """Return one line a run."""
    width = max((len(view.name) for view in views), default=0)
    return [
        Text(f" {view.name:<{width}}  ")
        .append(f"{view.status:<8}", style=STATUS_STYLES[view.status])
        .append(f"  step {view.step:,}")
        .append(f"/{view.total_steps:,}" if view.total_steps else "")
        .append(f"  loss {value(view.loss, '.4f')}")
        .append(f"  left {duration(view.seconds_left)}" if view.seconds_left is not None else "")
        .append(f"  {view.note}" if view.status in _TROUBLES and view.note else "")
        for view in views
    ]


def all_lines(view: RunView, *, now: float, events: int) -> list[Text]:
    """Return everything, for one print."""
    return [
        *head_lines(view),
        *alarm_lines(view.alarms, now=now, live=not view.has_ended),
        *gpu_lines(view),
        *event_lines(view.events, count=events),
    ]


def shown(lines: Sequence[Text], *, ascii_only: bool) -> list[Text]:
    """Return lines as they may go to a terminal: what would steer it becomes a question mark.

    Names and messages of files could hold anything.
    """
    for line in lines:
        line.plain = "".join(
            sign if sign.isprintable() and (sign.isascii() or not ascii_only) else "?"
            for sign in line.plain
        )
    return list(lines)


def fitted(line: Text, width: int, *, ascii_only: bool) -> Text:
    """Return a line that shows where it was cut: half a number would be another one.

    Args:
        line: What is to be shown.
        width: Characters that there is room for; 0: it is not known yet.
        ascii_only: Only ASCII may be used.
    """
    if not width or line.cell_len <= width:
        return line
    mark = "..." if ascii_only else "\u2026"
    line.truncate(max(0, width - len(mark)))
    return line.append(mark)


def _checkpoint(step: int) -> str:
    """Name what a run would go on from."""
    return f"checkpoint {step:,}" if step else "the start"


def _equals(seconds: float | None) -> str:
    return "" if seconds is None else f" = {duration(seconds)}"


def _clock(unix_seconds: float | None) -> str:
    if unix_seconds is None:
        return "--:--:--"
    return f"{datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC):%H:%M:%S}"
