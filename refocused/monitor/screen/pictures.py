"""Pictures of a run: loss, learning rate, speed, GPUs and cost."""

from __future__ import annotations

import io
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.metrics.history import LossHistory, LossPoint, StepPoint
from refocused.monitor.gpu_minutes import GpuMinute
from refocused.monitor.run_status import RunView

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


MOST_POINTS = 1000  # of a line: more than the picture has columns
UNSEEN_SHARE = 0.05  # of the steps, the first ones: their losses do not set the scale
ENOUGH_POINTS = 50  # from which on they do not

Line = tuple[list[float], list[float]]


def draw_summary(view: RunView, gpus: Sequence[GpuMinute], *, title: str) -> bytes:
    """Return the picture as a PNG; a part of which nothing is known says so."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8))
    ((loss, rate, speed), (busy, power, cost)) = figure.subplots(2, 3)
    figure.subplots_adjust(left=0.06, right=0.95, top=0.9, bottom=0.07, hspace=0.3, wspace=0.32)
    figure.suptitle(title)
    _draw_losses(loss, view)
    steps = view.steps
    _draw(rate, step_line(steps, lambda point: point.learning_rate), "learning rate", "step")
    _draw(speed, step_line(steps, lambda point: point.tokens_per_second), "tokens a second", "step")
    _draw(cost, _money_line(steps), _money_name(steps), "step")
    _draw(busy, gpu_line(gpus, lambda minute: minute.utilization_fraction), "GPUs busy", "hours")
    _draw_beside(busy, gpu_line(gpus, lambda minute: minute.hottest_celsius), "hottest GPU, C")
    _draw(power, gpu_line(gpus, lambda minute: minute.power_watts), "watts a GPU", "hours")
    _draw_beside(power, gpu_line(gpus, lambda minute: minute.memory_gib), "GPU memory, GiB")
    for axes in (rate, speed, busy, power, cost):
        axes.set_ylim(bottom=0)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()


def step_line(steps: Sequence[StepPoint], value: Callable[[StepPoint], float | None]) -> Line:
    """Return what was measured at steps as a line, thinned by means of neighbours."""
    return thinned([(point.step, _known(value(point))) for point in steps])


def gpu_line(minutes: Sequence[GpuMinute], value: Callable[[GpuMinute], float | None]) -> Line:
    """Return what was sampled as a line over hours since the first sample."""
    first = minutes[0].time if minutes else 0.0
    return thinned([((one.time - first) / 3600, _known(value(one))) for one in minutes])


def thinned(points: Sequence[tuple[float, float]]) -> Line:
    """Return at most so many points as can be told apart, each the mean of some.

    What is not finite is left out of a mean; where nothing else is, it stays, as a gap.
    """
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    places, values = [], []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        finite = [value for _, value in group if math.isfinite(value)]
        places.append(statistics.fmean(place for place, _ in group))
        values.append(statistics.fmean(finite) if finite else math.nan)
    return places, values


def _draw_losses(axes: Axes, view: RunView) -> None:
    training = step_line(view.steps, lambda point: point.loss)
    validation = thinned([(point.step, _known(point.loss)) for point in view.validations])
    _draw(axes, training, "loss, nats a token", "step", label="training")
    if any(map(math.isfinite, validation[1])):
        axes.plot(*validation, marker="o", markersize=3, color="C1", label="validation")
    if axes.lines:
        axes.legend()
    unseen = UNSEEN_SHARE * (view.steps[-1].step if view.steps else 0)
    seen = [
        value
        for place, value in itertools.chain(
            zip(*training, strict=True), zip(*validation, strict=True)
        )
        if math.isfinite(value) and place >= unseen
    ]
    if len(training[0]) >= ENOUGH_POINTS and seen:
        room = (max(seen) - min(seen)) * 0.05 or 0.1
        axes.set_ylim(min(seen) - room, max(seen) + room)


def _draw(axes: Axes, line: Line, name: str, along: str, *, label: str = "") -> None:
    axes.set_title(name, fontsize=10)
    axes.set_xlabel(along)
    axes.grid(alpha=0.3)
    if any(map(math.isfinite, line[1])):
        marker = "." if len(line[0]) < 3 else ""
        axes.plot(*line, linewidth=0.9, marker=marker, label=label)
    else:
        axes.text(0.5, 0.5, "not known", ha="center", transform=axes.transAxes, color="grey")


def _draw_beside(axes: Axes, line: Line, name: str) -> None:
    """Draw a second line over the first, with a scale of its own."""
    if any(map(math.isfinite, line[1])):
        beside = axes.twinx()
        beside.plot(*line, linewidth=0.9, color="C3")
        beside.set_ylim(0, 1.3 * max(filter(math.isfinite, line[1])) or 1.0)  # apart from the first
        axes.set_title(f"{axes.get_title()} (blue), {name} (red)", fontsize=10)


def _money_line(steps: Sequence[StepPoint]) -> Line:
    dollars = step_line(steps, lambda point: point.cost_usd)
    if any(map(math.isfinite, dollars[1])):
        return dollars
    return step_line(
        steps, lambda point: None if point.seconds_trained is None else point.seconds_trained / 3600
    )


def _money_name(steps: Sequence[StepPoint]) -> str:
    is_priced = any(point.cost_usd is not None for point in steps)
    return "cost, US dollars" if is_priced else "hours trained (no price is set)"


def _known(value: float | None) -> float:
    return math.nan if value is None else value
