"""Pictures of a run: loss, learning rate, speed, GPUs and cost."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.metrics.history import LossHistory, LossPoint, StepPoint
from refocused.monitor.readings import GpuMinute
from refocused.monitor.run_status import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 1000  # of a line: more than the picture has columns
UNSEEN_SHARE = 0.05  # of a curve, its begin, where a loss falls far: it does not set the scale
ENOUGH_POINTS = 40  # of a curve, for that

Line = tuple[list[float], list[float]]  # places, ascending, and values; NaN leaves a gap


def line_of(points: Iterable[object], place: str, field: str, *, most: int = MOST_POINTS) -> Line:
    """Return a field of points as a line of at most so many means of neighbours.

    What is unknown or not finite is left out of a mean; where nothing else is, it leaves a gap.
    """
    known = [(getattr(one, place), getattr(one, field)) for one in points]
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


def draw_history(history: LossHistory, file: Path, *, title: str) -> None:
    """Write training and validation losses over steps as a PNG, with the best one marked.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    _draw_losses(axes, history.training, history.validation)
    best = history.best
    if best is not None and best.loss is not None:
        label = f"best validation {best.loss:.4f}, step {best.step:,}"
        axes.axhline(best.loss, color="grey", linewidth=0.8, linestyle=":", label=label)
        axes.legend()
    axes.set_title(title)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=120)


def draw_summary(view: RunView, gpus: Sequence[GpuMinute], *, title: str) -> bytes:
    """Return the picture of a summary as a PNG; a part without any value is marked so."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8))
    ((loss, rate, speed), (busy, power, cost)) = figure.subplots(2, 3)
    figure.subplots_adjust(left=0.06, right=0.95, top=0.9, bottom=0.07, hspace=0.3, wspace=0.32)
    figure.suptitle(title)
    steps = view.steps
    _draw_losses(loss, steps, view.validations)
    _draw(rate, line_of(steps, "step", "learning_rate"), "learning rate", "step")
    _draw(speed, line_of(steps, "step", "tokens_per_second"), "tokens a second", "step")
    money = line_of(steps, "step", "cost_usd")
    if is_empty(money):
        places, seconds = line_of(steps, "step", "seconds_trained")
        hours = [one / 3600 for one in seconds]
        _draw(cost, (places, hours), "hours trained (no price is set)", "step")
    else:
        _draw(cost, money, "cost, US dollars", "step")
    _draw(busy, _gpu_line(gpus, "utilization_fraction"), "GPUs busy", "hours")
    _draw_beside(busy, _gpu_line(gpus, "hottest_celsius"), "hottest GPU, C")
    _draw(power, _gpu_line(gpus, "power_watts"), "watts a GPU", "hours")
    _draw_beside(power, _gpu_line(gpus, "memory_gib"), "GPU memory, GiB")
    for axes in (rate, speed, busy, power, cost):
        axes.set_ylim(bottom=0)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()


def _gpu_line(minutes: Sequence[GpuMinute], field: str) -> Line:
    places, values = line_of(minutes, "time", field)
    return [(place - minutes[0].time) / 3600 for place in places], values


def _draw_losses(
    axes: Axes, steps: Sequence[StepPoint | LossPoint], validations: Sequence[LossPoint]
) -> None:
    training, validation = line_of(steps, "step", "loss"), line_of(validations, "step", "loss")
    _draw(axes, training, "loss, nats a token", "step", label="training")
    if not is_empty(validation):
        axes.plot(*validation, marker="o", markersize=3, color="C1", label="validation")
    if axes.lines:
        axes.set_ylim(*limits(training, validation))
        axes.legend()


def _draw(axes: Axes, line: Line, name: str, along: str, *, label: str = "") -> None:
    axes.set_title(name, fontsize=10)
    axes.set_xlabel(along)
    axes.grid(alpha=0.3)
    if is_empty(line):
        axes.text(0.5, 0.5, "not known", ha="center", transform=axes.transAxes, color="grey")
    else:
        marker = "." if len(line[0]) < 3 else ""
        axes.plot(*line, linewidth=0.9, marker=marker, label=label)


def _draw_beside(axes: Axes, line: Line, name: str) -> None:
    """Draw a second line over the first, with a scale of its own."""
    if not is_empty(line):
        beside = axes.twinx()
        beside.plot(*line, linewidth=0.9, color="C3")
        beside.set_ylim(0, 1.3 * max(filter(math.isfinite, line[1])) or 1.0)  # apart from the first
        axes.set_title(f"{axes.get_title()} (blue), {name} (red)", fontsize=10)
