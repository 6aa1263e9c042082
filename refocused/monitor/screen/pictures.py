"""Pictures of a run: one of its losses, and one of all that its summary shows."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.metrics.history import MetricsTimeline, lowest
from refocused.monitor.screen.page import RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 1000  # of a line: more than the picture has columns
UNSEEN_SHARE = 0.05  # first part of a curve, where a loss falls far: it does not set the scale
ENOUGH_POINTS = 40  # of a curve, for that
COLOURS = "#0072b2", "#d55e00", "#009e73"  # Okabe and Ito: colour-blind readers tell them apart
LOSS = "loss, nats per token"
PANELS = (  # title, what it is drawn along, and for each line its table and column
    (LOSS, "step", {"training": "steps loss", "validation": "validations loss"}),
    ("learning rate", "step", {"": "steps learning_rate"}),
    ("tokens per second", "step", {"": "steps tokens_per_second"}),
    ("gradient norm", "step", {"": "steps gradient_norm"}),
    ("cost, US dollars", "step", {"": "steps cost_usd"}),
    (
        "steps saved",
        "time",
        {"trained": "steps step", "saved": "saved step", "mirrored": "mirrored step"},
    ),
    ("GPU utilization, mean", "time", {"": "gpus utilization_fraction"}),
    ("hottest GPU, degrees C", "time", {"": "gpus hottest_celsius"}),
    ("power, watts per GPU", "time", {"": "gpus power_watts"}),
)

Line = tuple[list[float], list[float]]  # places, ascending, and values; NaN leaves a gap
Panel = tuple[str, str, dict[str, Line]]  # title, name of the places, lines by name


def line_of(points: Iterable[object], place: str, field: str, *, most: int = MOST_POINTS) -> Line:
    """Return a field of points as a line of at most so many means of neighbours.

    What is unknown or not finite is left out of a mean; where nothing else is, it leaves a gap.
    """
    known = [
        (at, getattr(one, field, None))
        for one in points
        if (at := getattr(one, place, None)) is not None
    ]
    size = max(1, math.ceil(len(known) / most))
    places, values = [], []
    for start in range(0, len(known), size):
        group = known[start : start + size]
        finite = [value for _, value in group if value is not None and math.isfinite(value)]
        places.append(group[-1][0])
        values.append(statistics.fmean(finite) if finite else math.nan)
    return places, values


def is_empty(line: Line) -> bool:
    """Whether a line has no value at all."""
    return not any(map(math.isfinite, line[1]))


def limits(*lines: Line) -> tuple[float, float]:
    """Return the lowest and the highest value to show; one value at least must be finite."""
    points = [
        (place, value)
        for line in lines
        for place, value in zip(*line, strict=True)
        if math.isfinite(value)
    ]
    if len(points) >= ENOUGH_POINTS:
        first, last = min(points)[0], max(points)[0]
        points = [one for one in points if one[0] >= first + UNSEEN_SHARE * (last - first)]
    low, high = min(value for _, value in points), max(value for _, value in points)
    room = (high - low) * 0.05 or abs(high) * 0.01 or 1.0
    return low - room, high + room


def draw_history(history: MetricsTimeline, file: Path, *, title: str) -> None:
    """Write the losses over steps as a PNG, the best one marked; raise OSError if that fails."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    points = {"steps": history.steps, "validations": history.validations}
    for panel in _panels(points):
        _draw_panel(axes, panel)
    best = lowest(history.validations)
    if best is not None and best.loss is not None:
        label = f"best validation {best.loss:.4f}, step {best.step:,}"
        axes.axhline(best.loss, color="grey", linewidth=0.8, linestyle=":", label=label)
        axes.legend()
    axes.set_title(title)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=120)


def draw_summary(report: RunReport) -> bytes:
    """Return the picture of a summary as a PNG, with a panel for everything that is known."""
    from matplotlib.figure import Figure

    panels = _panels(report.points)
    width = min(3, max(1, math.ceil(math.sqrt(len(panels)))))
    height = max(1, math.ceil(len(panels) / width))
    figure = Figure(figsize=(4.4 * width, 0.6 + 3.2 * height), layout="constrained")
    figure.suptitle(report.title)
    grid = figure.add_gridspec(height, 12)
    for number, panel in enumerate(panels):
        row, place = divmod(number, width)
        size = 12 // min(width, len(panels) - row * width)  # the last row's share all of it
        axes = figure.add_subplot(grid[row, place * size : (place + 1) * size])
        _draw_panel(axes, panel)
        axes.set_title(panel[0], fontsize=10)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()


def _panels(points: Mapping[str, Iterable[object]]) -> list[Panel]:
    """Return the panels that have a value; times are since the first one."""
    panels = []
    for title, along, names in PANELS:
        lines = {
            name: line
            for name, (table, field) in ((name, text.split()) for name, text in names.items())
            if not is_empty(line := line_of(points.get(table, ()), along, field))
        }
        if along == "time" and lines:
            times = [place for places, _ in lines.values() for place in places]
            began = min(times)
            along, unit = ("minutes", 60) if max(times) - began < 7200 else ("hours", 3600)
            lines = {
                name: ([(place - began) / unit for place in places], values)
                for name, (places, values) in lines.items()
            }
        if lines and ("saved" in lines or "saved" not in names):
            panels.append((title, along, lines))
    return panels


def _draw_panel(axes: Axes, panel: Panel) -> None:
    title, along, lines = panel
    axes.set_xlabel(along)
    axes.grid(alpha=0.3)
    axes.locator_params("x", nbins=6)
    for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
        style = "steps-post" if title == "steps saved" else "default"
        marker = "." if len(line[0]) < 3 or name == "validation" else ""
        axes.plot(*line, linewidth=0.9, color=colour, marker=marker, label=name, drawstyle=style)
    if title in (LOSS, "gradient norm"):
        axes.set_ylim(*limits(*lines.values()))
    elif not title.startswith("hottest"):
        axes.set_ylim(bottom=0)
    if len(lines) > 1:
        axes.legend(fontsize=8)
