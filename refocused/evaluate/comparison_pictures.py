"""Pictures of compared models: scores over steps, speed over lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refocused.evaluate.comparison import SpeedRow
from refocused.evaluate.multiple_choice import Measure


def draw_scores(
    rows: Mapping[str, Mapping[str, Measure]], file: Path, *, steps: Mapping[str, int]
) -> None:
    """Write each measure over the models as a PNG, with standard errors.

    Args:
        rows: For each model the measures by what they are called.
        file: Where the picture goes.
        steps: Step of each model; where one has none, models stand side by side by name.

    Raises:
        OSError: The file cannot be written.
    """
    names = list(dict.fromkeys(name for measures in rows.values() for name in measures))
    figure, panels = _panels(len(names))
    over_steps = len(set(steps.values())) == len(rows)
    for axes, name in zip(panels, names, strict=True):
        known = {model: found[name] for model, found in rows.items() if name in found}
        places = [steps[model] for model in known] if over_steps else list(range(len(known)))
        values = [measure.value for measure in known.values()]
        errors = [measure.standard_error or 0.0 for measure in known.values()]
        axes.errorbar(
            places, values, yerr=errors, marker="o", capsize=3, linestyle="-" if over_steps else ""
        )
        axes.set_title(name)
        axes.set_xlabel("step" if over_steps else "model")
        if not over_steps:
            axes.set_xticks(places, list(known), rotation=30, ha="right")
    _save(figure, file)


def draw_speed(rows: Sequence[SpeedRow], file: Path) -> None:
    """Write latency, tokens a second and memory over the length as a PNG.

    Raises:
        OSError: The file cannot be written.
    """
    columns = {
        "latency_seconds": "latency, s",
        "tokens_per_second": "tokens read a second",
        "written_per_second": "tokens written a second",
        "memory_gib": "memory of a pass, GiB",
    }
    figure, panels = _panels(len(columns))
    for axes, (column, label) in zip(panels, columns.items(), strict=True):
        for model, batch in dict.fromkeys((row.model, row.batch) for row in rows):
            own = [row for row in rows if (row.model, row.batch) == (model, batch)]
            known = [row for row in own if getattr(row, column)]  # a logarithm has no zero
            axes.plot(
                [row.length for row in known],
                [getattr(row, column) for row in known],
                marker="o",
                label=f"{model}, batch {batch}",
            )
        if any(getattr(row, column) for row in rows):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        else:  # of no value matplotlib makes no logarithmic axis
            axes.text(0.5, 0.5, "unknown", ha="center", transform=axes.transAxes)
        axes.set_xlabel("tokens of a prompt")
        axes.set_title(label)
    panels[0].legend(fontsize="small")
    _save(figure, file)


def _panels(count: int) -> tuple[Any, list[Any]]:
    """Return a figure with so many axes, two a row."""
    from matplotlib.figure import Figure

    rows = (count + 1) // 2
    figure = Figure(figsize=(11, 3.6 * rows), layout="constrained")
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axes in panels[count:]:
        axes.remove()
    for axes in panels[:count]:
        axes.grid(alpha=0.3)
    return figure, panels[:count]


def _save(figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=120)
