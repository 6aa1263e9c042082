"""The summary of a run: SUMMARY.md, summary.png, and both in one summary.html."""

from __future__ import annotations

import base64
import collections
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol

from refocused.config.prices import usd_per_million_tokens
from refocused.metrics.jsonl import JsonLinesTail, number, text
from refocused.metrics.step_metrics import dollars, duration, perplexity
from refocused.monitor.gpu_minutes import GpuMinute, read_gpu_minutes
from refocused.monitor.run_reader import event_of
from refocused.monitor.run_status import Event, RunView
from refocused.monitor.screen.dashboard_words import moment, percent, time_text, value
from refocused.monitor.screen.pictures import draw_summary
from refocused.system.atomic_files import replace_file

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
table { border-collapse: collapse; }
td { padding: 0.15rem 1.5rem 0.15rem 0; border-bottom: 1px solid #8884; }
td:first-child { opacity: 0.7; }
img { max-width: 100%; margin: 1.5rem 0; }
"""


class Told(Protocol):
    """What the page shows."""

    @property
    def title(self) -> str:
        """Name and status."""

    @property
    def rows(self) -> Sequence[tuple[str, str]]:
        """What and how much, in order."""

    @property
    def troubles(self) -> Sequence[str]:
        """Warnings and failures."""

    @property
    def written(self) -> str:
        """The time of the page."""


def render_page(told: Told, picture: bytes) -> str:
    """Return the page, with the picture (a PNG) inside."""
    rows = "\n".join(
        f"<tr><td>{escape(what)}</td><td>{escape(words)}</td></tr>" for what, words in told.rows
    )
    troubles = "\n".join(f"<li>{escape(trouble)}</li>" for trouble in told.troubles)
    listed = f"<h2>Warnings and failures</h2>\n<ul>\n{troubles}\n</ul>\n" if troubles else ""
    image = base64.b64encode(picture).decode()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(told.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(told.title)}</h1>
<table>
{rows}
</table>
<img alt="loss, speed, GPUs and cost over time" src="data:image/png;base64,{image}">
{listed}<p>Written {escape(told.written)}.</p>
</body>
</html>
"""


TROUBLES_SHOWN = 20
TEXT_FILE, PICTURE_FILE, PAGE_FILE = "SUMMARY.md", "summary.png", "summary.html"


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """How often what happened.

    Attributes:
        sessions: Starts and resumes.
        saves: Steps that were saved, all ways that were taken.
        stall_seconds: Mean time that training stood still for a save; None: none was saved.
        alarms: Alarms that were raised.
    """

    sessions: int
    saves: int
    stall_seconds: float | None
    alarms: int


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What is to be said of a run.

    Attributes:
        title: Name and status.
        rows: What and how much, in order.
        troubles: The last warnings and failures.
        written: The time of this summary.
    """

    title: str
    rows: Sequence[tuple[str, str]]
    troubles: Sequence[str]
    written: str


def write_summary(folder: Path, view: RunView, *, now: float) -> list[Path]:
    """Write the summary of a run into its folder; return the files.

    Args:
        folder: The run's.
        view: The run.
        now: Unix seconds.

    Raises:
        OSError: The folder cannot be written.
    """
    gpus = read_gpu_minutes(folder / "logs")
    files = sorted((folder / "logs").glob("events*.jsonl"))
    records = [record for file in files for record in JsonLinesTail(file).records()]
    summary = summarize(view, gpus, counts(records), troubles_of(records), now=now)
    picture = draw_summary(view, gpus, title=summary.title)
    files = [folder / TEXT_FILE, folder / PICTURE_FILE, folder / PAGE_FILE]
    contents = [as_markdown(summary).encode(), picture, render_page(summary, picture).encode()]
    for file, content in zip(files, contents, strict=True):
        replace_file(file, content, durable=True)
    return files


def counts(events: Iterable[dict[str, Any]]) -> Counts:
    """Count lines of events by what they tell of."""
    found, stalls = collections.Counter[str](), []
    for event in events:
        kind = text(event, "kind") or ""
        if kind != "alarm" or event.get("raised") is True:
            found[kind] += 1
        if kind == "save" and (stall := number(event, "stall_seconds")) is not None:
            stalls.append(stall)
    return Counts(
        sessions=found["start"] + found["resume"],
        saves=found["save"],
        stall_seconds=statistics.fmean(stalls) if stalls else None,
        alarms=found["alarm"],
    )


def troubles_of(events: Iterable[dict[str, Any]]) -> list[Event]:
    """Return the warnings and failures among lines of events, by their time."""
    found = [event for line in events if (event := event_of(line)) and event.is_trouble]
    return sorted(found, key=lambda event: event.time or 0.0)


def summarize(
    view: RunView,
    gpus: Sequence[GpuMinute],
    count: Counts,
    troubles: Sequence[Event],
    *,
    now: float,
) -> Summary:
    """Say what there is to be said; `now` is in Unix seconds."""
    rows = [*_progress(view), *_losses(view), *_money(view), *_speed(view), *_gpus(gpus)]
    rows += _saves(view, count)
    return Summary(
        title=f"{view.name}: {view.status}",
        rows=rows,
        troubles=[_trouble(event) for event in troubles[-TROUBLES_SHOWN:]],
        written=moment(now),
    )


def as_markdown(summary: Summary) -> str:
    """Return the summary as Markdown."""
    lines = [f"# {summary.title}", "", "| | |", "|---|---|"]
    lines += [f"| {_cell(what)} | {_cell(words)} |" for what, words in summary.rows]
    lines += ["", f"![loss, speed, GPUs and cost over time]({PICTURE_FILE})"]
    if summary.troubles:
        lines += ["", "Warnings and failures, the last ones:", ""]
        lines += [f"- {_cell(trouble)}" for trouble in summary.troubles]
    return "\n".join([*lines, "", f"Written {summary.written}.", ""])


def _progress(view: RunView) -> list[tuple[str, str]]:
    ended = "" if view.exit_code is None or view.is_live else f", exit code {view.exit_code}"
    note = f" ({view.note})" if view.note else ""
    return [
        ("status", f"{view.status}{ended}{note}"),
        (
            "steps",
            f"{view.step:,} of {value(view.total_steps, ',')} ({percent(view.progress_fraction)})",
        ),
        ("tokens", value(view.tokens, ",")),
    ]


def _losses(view: RunView) -> list[tuple[str, str]]:
    rows = [("training loss", value(view.loss, ".4f"))]
    for what, loss, where in (
        ("validation loss", view.validation_loss, ""),
        ("best validation loss", view.best_loss, f" at step {view.best_step or 0:,}"),
    ):
        if loss is not None:
            rows.append((what, f"{loss:.4f}, perplexity {perplexity(loss):.2f}{where}"))
    return rows


def _money(view: RunView) -> list[tuple[str, str]]:
    rows = [("time trained", f"{time_text(view.seconds_trained)}{dollars(view.cost_usd)}")]
    price = usd_per_million_tokens(view.cost_usd, view.tokens)
    if price is not None:
        rows.append(("a million tokens", f"${price:.4f}"))
    if view.seconds_left is not None:
        left = f"{duration(view.seconds_left)}{dollars(view.cost_left_usd)}"
        begin = "" if view.resumes_from is None else f", from step {view.resumes_from:,} on"
        rows.append(("left", left + begin))
    return rows


def _speed(view: RunView) -> list[tuple[str, str]]:
    forms = (
        ("tokens a second, mean", "tokens_per_second", ",.0f", statistics.harmonic_mean),
        ("step, mean", "step_seconds", ".3g", statistics.fmean),
        ("MFU, mean", "mfu_fraction", ".1%", statistics.harmonic_mean),
        ("waited for data, mean", "data_wait_fraction", ".1%", statistics.fmean),
    )
    rows = []
    for what, name, form, mean in forms:
        measured = [getattr(point, name) for point in view.steps]
        found = [one for one in measured if one is not None and one >= 0]
        if found:
            unit = " s" if name == "step_seconds" else ""
            rows.append((what, format(mean(found), form) + unit))
    return rows


def _gpus(minutes: Sequence[GpuMinute]) -> list[tuple[str, str]]:
    used = [m.utilization_fraction for m in minutes if m.utilization_fraction is not None]
    hottest = [m.hottest_celsius for m in minutes if m.hottest_celsius is not None]
    memory = [m.memory_gib for m in minutes if m.memory_gib is not None]
    rows = []
    if used:
        rows.append(("GPUs busy, mean", f"{statistics.fmean(used):.1%}"))
    if hottest:
        rows.append(("hottest GPU", f"{max(hottest):.0f} C"))
    if memory:
        rows.append(("GPU memory, most", f"{max(memory):.1f} GiB"))
    return rows


def _saves(view: RunView, count: Counts) -> list[tuple[str, str]]:
    stall = "" if count.stall_seconds is None else f", {count.stall_seconds:.3g} s each of standing"
    newest = view.saves.newest_step
    rows = [
        ("sessions", f"{count.sessions:,}"),
        ("saves", f"{count.saves:,}{stall}"),
        ("newest checkpoint here", "none" if newest is None else f"step {newest:,}"),
    ]
    if view.mirror is not None:
        there = view.mirror.newest_step
        up_to = "nothing yet" if there is None else f"up to step {there:,}"
        rows.append(("mirror", f"{view.mirror.bucket}: {up_to}, {view.mirror.waiting} waiting"))
    return [*rows, ("alarms", f"{count.alarms:,}")]


def _trouble(event: Event) -> str:
    return event.text if event.time is None else f"{moment(event.time)}: {event.text}"


def _cell(words: str) -> str:
    """Keep a text on its line and in its cell."""
    return " ".join(words.split()).replace("|", "\\|").replace("<", "&lt;")
