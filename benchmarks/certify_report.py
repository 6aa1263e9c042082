"""Write the report of a certificate: a Markdown page and three pictures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import Record

from refocused.estimate.step_time import StepTime

STEP_COLUMNS = (
    ("step", "step_ms", "{:,.1f} ms"),
    ("tokens/s", "tokens_per_second", "{:,.0f}"),
    ("MFU", "mfu", "{:.1%}"),
    ("expected MFU", "expected_mfu", "{:.1%}"),
    ("of measured products", "of_products", "{:.1%}"),
    ("idle", "idle", "{:.1%}"),
    ("peak", "peak_gib", "{:.1f} GiB"),
    ("plan", "plan_gib", "{:.1f} GiB"),
    ("micro-batch", "micro", "{}"),
    ("passes", "accumulation", "{}"),
)
RUN_COLUMNS = (
    ("step", "step_ms", "{:,.1f} ms"),
    ("data wait", "data_wait", "{:.2%}"),
    ("save", "save_seconds", "{:.2f} s"),
    ("stall", "stall_seconds", "{:.3f} s"),
    ("losses after the resume", "same_losses", "{}"),
    ("checkpoint after the resume", "same_files", "{}"),
)


def write_text(file: Path, content: Record, rows: Mapping[str, Record], *, left: int) -> None:
    """Write the page of a certificate, with a row for each part; `left` are missing."""
    machine = content["machine"]
    gpus = machine["gpus"]
    name = f"{len(gpus)} x {gpus[0]}" if gpus else "CPU (a walk through the path, no certificate)"
    lines = [
        f"# {name}, {machine['date']}",
        "",
        f"torch {machine['torch']}, DeepSpeed {machine['deepspeed']}, transformers "
        f"{machine['transformers']}, Python {machine['python']}, {machine['processor']} with "
        f"{machine['cores']} cores. Made by `benchmarks/certify_gpu.py`.",
    ]
    if left:
        lines += ["", f"**Not complete: {left} parts are left.**"]
    if "tests" in rows:
        found = rows["tests"]
        ended = (found["lines"] or ["-"])[-1].strip("= ")  # such as "23 passed, 1 skipped in 40 s"
        lines += ["", "## Tests marked gpu", "", f"{ended} (exit code {found['exit_code']})", ""]
        kinds = ("FAILED", "ERROR", "SKIPPED")
        lines += [f"- {line}" for line in found["lines"] if line.startswith(kinds)]
    steps = {title: row for title, row in rows.items() if "tokens_per_second" in row}
    models = dict.fromkeys(title.partition(": ")[0] for title in steps)
    for model in models:
        of_model = {
            title.partition(": ")[2]: row
            for title, row in steps.items()
            if title.partition(": ")[0] == model
        }
        lines += ["", f"## {model}", "", *_table(of_model, STEP_COLUMNS)]
        computed = {title: row["computed"] for title, row in of_model.items() if row["computed"]}
        lines += ["", *(f"- {title}: {text}" for title, text in computed.items())]
    runs = {title: row for title, row in rows.items() if "same_losses" in row}
    if runs:
        shown = {
            title: row | {key: _same(row[key]) for key in ("same_losses", "same_files")}
            for title, row in runs.items()
        }
        lines += ["", "## Whole runs, ZeRO-3", "", *_table(shown, RUN_COLUMNS)]
    if "links" in rows:
        lines += ["", "## Links, GB/s", ""]
        lines += [f"- {pair}: {speed:.1f}" for pair, speed in rows["links"].items()]
    if content["left out"]:
        lines += ["", "## Left out", ""]
        lines += [f"- {title}: {reason}" for title, reason in content["left out"].items()]
    pictures = [path.name for path in sorted(file.parent.glob("*.png"))]
    lines += ["", *(f"![{name}]({name})" for name in pictures), ""]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines))


def write_pictures(folder: Path, rows: Mapping[str, Record]) -> None:
    """Draw speed, memory against the plan, and the spread of steps."""
    steps = {title: row for title, row in rows.items() if "tokens_per_second" in row}
    if not steps:
        return
    import matplotlib

    matplotlib.use("Agg")
    titles = list(steps)
    speeds = [
        row["mfu"] if row["mfu"] is not None else row["of_products"] for row in steps.values()
    ]
    has_mfu = any(row["mfu"] is not None for row in steps.values())
    _draw(
        folder / "speed.png",
        titles,
        lambda axes, places: axes.barh(places, [100 * speed for speed in speeds]),
        label="MFU, %" if has_mfu else "share of measured products, %",
    )
    _draw(
        folder / "steps.png",
        titles,
        lambda axes, places: axes.boxplot(
            [row["all_ms"] for row in steps.values()], positions=places, vert=False
        ),
        label="step, ms",
    )

    def memory(axes: Any, places: Sequence[int]) -> None:
        axes.barh(places, [row["peak_gib"] or 0 for row in steps.values()], label="peak")
        planned = [
            (place, row["plan_gib"]) for place, row in zip(places, steps.values(), strict=True)
        ]
        known = [(place, plan) for place, plan in planned if plan is not None]
        axes.plot([plan for _, plan in known], [place for place, _ in known], "k|", label="plan")
        axes.legend()

    _draw(folder / "memory.png", titles, memory, label="GiB")


def _draw(
    file: Path, titles: Sequence[str], draw: Callable[[Any, Sequence[int]], Any], *, label: str
) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.25 * len(titles)), layout="constrained")
    places = range(len(titles))
    draw(axes, list(places))
    axes.set_yticks(list(places), titles, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def expected_table(rows: Mapping[str, StepTime]) -> list[str]:
    """Return the parts of expected steps as a Markdown table: milliseconds and per cent."""
    shown = {}
    for title, step in rows.items():
        parts = {
            name: f"{1000 * seconds:,.1f} ({seconds / step.seconds:.1%})"
            for name, seconds in step.parts.items()
        }
        shown[title] = parts | {"step": f"{1000 * step.seconds:,.0f}", "mfu": step.mfu_fraction}
    names = next(iter(shown.values()))
    columns = [(name, name, "{}") for name in names if name != "mfu"]
    return _table(shown, [*columns, ("MFU", "mfu", "{:.1%}")])


def _table(rows: Mapping[str, Record], columns: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the rows as a Markdown table; missing values are dashes."""
    head = ["", *(heading for heading, _, _ in columns)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for title, row in rows.items():
        cells = ["-" if row.get(key) is None else form.format(row[key]) for _, key, form in columns]
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return lines


def _same(is_same: bool) -> str:
    return "equal to the last bit" if is_same else "DIFFERENT"
