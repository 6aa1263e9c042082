"""The picture of a run's losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from refocused.metrics.history import LossHistory, LossPoint


def draw_history(history: LossHistory, file: Path, *, title: str) -> None:
    """Write training and validation losses over steps as a PNG, with the best one marked.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    if history.training:
        axes.plot(*_line(history.training), linewidth=0.9, label="training")
    if history.validation:
        axes.plot(*_line(history.validation), marker="o", markersize=3, label="validation")
    best = history.best
    if best is not None and best.loss is not None:
        label = f"best validation {best.loss:.4f}, step {best.step:,}"
        axes.axhline(best.loss, color="grey", linewidth=0.8, linestyle=":", label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=120)


def _line(points: Sequence[LossPoint]) -> tuple[list[int], list[float]]:
    """Steps and losses; one that is not finite leaves a gap."""
    losses = [math.nan if point.loss is None else point.loss for point in points]
    return [point.step for point in points], losses
