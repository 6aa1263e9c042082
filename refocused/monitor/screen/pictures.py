"""Curves of a run thinned for a screen or a page, and the picture of its losses."""

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refocused.metrics.expected_loss import expected_columns
from refocused.metrics.history import MetricsTimeline, lowest
from refocused.metrics.jsonl import Record

MOST_POINTS = 1000  # of a line: more than the picture has columns
UNSEEN_SHARE = 0.05  # first part of a curve, where a loss falls far: it does not set the scale
ENOUGH_POINTS = 40  # of a curve, for that

_PLACES = ("step", "tokens", "seconds_trained", "time")  # ascending: the last of a group counts

Line = tuple[list[float], list[float]]  # steps, ascending, and values; NaN leaves a gap
Columns = dict[str, list[float | None]]  # of a table, by field


def columns(
    points: Sequence[Any], *fields: str, began: float = 0.0, most: int = MOST_POINTS
) -> Columns:
    """Return fields of points as columns of equal length.

    More than `most` points become groups of neighbours: the mean of each, and its extremes as
    `NAME_low` and `NAME_high`. Values that are unknown, not finite or no numbers are left out, as
    is a field without any other. `time` becomes hours since `began`.
    """
    size = max(1, math.ceil(len(points) / most))
    curves: Columns = {}
    for name in fields:
        values: list[Any] = [getattr(point, name, None) for point in points]
        numbers = [isinstance(value, int | float) and math.isfinite(value) for value in values]
        groups = [
            list(itertools.compress(values[first : first + size], numbers[first : first + size]))
            for first in range(0, len(values), size)
        ]
        if name == "time":
            groups = [[(value - began) / 3600 for value in group] for group in groups]
        if name in _PLACES and groups and all(groups):
            curves[name] = [_short(group[-1]) for group in groups]
        elif name not in _PLACES and any(groups):
            curves[name] = [_short(statistics.fmean(group)) if group else None for group in groups]
            if size > 1:
                curves[f"{name}_low"] = [_short(min(group)) if group else None for group in groups]
                curves[f"{name}_high"] = [_short(max(group)) if group else None for group in groups]
    return curves


def _short(value: float) -> float:
    """Keep seven digits, and write a whole number without a point."""
    short = float(f"{value:.7g}")
    return int(short) if short.is_integer() else short


def line_of(points: Sequence[Any], field: str, *, most: int = MOST_POINTS) -> Line:
    """Return a field over the steps as a line of at most so many means of neighbours."""
    curves = columns(points, "step", field, most=most)
    steps = [step for step in curves.get("step", []) if step is not None]
    values = curves.get(field, [None] * len(steps))
    return steps, [math.nan if value is None else value for value in values]


def is_empty(line: Line) -> bool:
    """Whether a line has no value at all."""
    return not any(map(math.isfinite, line[1]))


def limits(*lines: Line) -> tuple[float, float]:
    """Return the lowest and the highest value to show; one value at least must be finite."""
    points = [
        (step, value)
        for line in lines
        for step, value in zip(*line, strict=True)
        if math.isfinite(value)
    ]
    if len(points) >= ENOUGH_POINTS:
        first, last = min(points)[0], max(points)[0]
        points = [point for point in points if point[0] >= first + UNSEEN_SHARE * (last - first)]
    low, high = min(value for _, value in points), max(value for _, value in points)
    room = (high - low) * 0.05 or abs(high) * 0.01 or 1.0
    return low - room, high + room


def draw_history(
    history: MetricsTimeline, file: Path, *, title: str, expected: Record | None = None
) -> None:
    """Write the losses over steps as a PNG, the best one marked; raise OSError if that fails.

    Args:
        history: The logged steps and validations.
        file: The picture, whose folder is made.
        title: Above the drawing.
        expected: The run's `expected_loss.json`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    training = line_of(list(history.steps), "loss")
    validation = line_of(list(history.validations), "loss")
    # Okabe and Ito's colours: colour-blind readers tell them apart.
    if not is_empty(training):
        marker = "." if len(training[0]) < 3 else ""
        axes.plot(*training, linewidth=0.9, color="#0072b2", marker=marker, label="training")
    if not is_empty(validation):
        axes.plot(*validation, linewidth=0.9, color="#d55e00", marker=".", label="validation")
    steps, *drawn = expected_columns(expected, list(history.steps)).values() or [[]]
    if drawn:
        look: Any = {"color": "#009e73", "linewidth": 0.9}
        axes.plot(steps, drawn[0], **look, linestyle="--", label="expected")
        axes.fill_between(steps, *drawn[1:], **look, alpha=0.2)
    if axes.lines:
        axes.set_ylim(*limits(training, validation, *((steps, values) for values in drawn)))
    best = lowest(history.validations)
    if best is not None and best.loss is not None:
        label = f"best validation {best.loss:.4f}, step {best.step:,}"
        axes.axhline(best.loss, color="grey", linewidth=0.8, linestyle=":", label=label)
        axes.legend()
    axes.set(title=title, xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=120)
