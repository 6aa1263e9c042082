"""Curves of a run thinned for a screen, and the picture of its losses."""

import math
import statistics
from collections.abc import Iterable
from pathlib import Path

from refocused.metrics.history import MetricsTimeline, lowest

MOST_POINTS = 1000  # of a line: more than the picture has columns
UNSEEN_SHARE = 0.05  # first part of a curve, where a loss falls far: it does not set the scale
ENOUGH_POINTS = 40  # of a curve, for that

Line = tuple[list[float], list[float]]  # places, ascending, and values; NaN leaves a gap


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
    training = line_of(history.steps, "step", "loss")
    validation = line_of(history.validations, "step", "loss")
    # Okabe and Ito's colours: colour-blind readers tell them apart.
    if not is_empty(training):
        marker = "." if len(training[0]) < 3 else ""
        axes.plot(*training, linewidth=0.9, color="#0072b2", marker=marker, label="training")
    if not is_empty(validation):
        axes.plot(*validation, linewidth=0.9, color="#d55e00", marker=".", label="validation")
    if axes.lines:
        axes.set_ylim(*limits(training, validation))
    best = lowest(history.validations)
    if best is not None and best.loss is not None:
        label = f"best validation {best.loss:.4f}, step {best.step:,}"
        axes.axhline(best.loss, color="grey", linewidth=0.8, linestyle=":", label=label)
        axes.legend()
    axes.set(title=title, xlabel="step", ylabel="loss, nats per token")
    axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=120)
