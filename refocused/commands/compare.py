"""`compare RUN RUN ...`: settings, figures, losses and scores of runs side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser, add_json
from refocused.commands.output import print_result, setting_text, table, write_picture
from refocused.commands.run_selection import find_run, whole_steps
from refocused.system.errors import ConfigError
from refocused.system.logs import print_message
from refocused.system.number_text import known

if TYPE_CHECKING:
    from refocused.monitor.run_reader import RunView

ROWS = 10  # at most, of a table of losses
WARNINGS = {  # by what differs of that which losses are measured on
    "tokenizer": "The tokenizers differ: losses per token do not compare. Bits per byte do, if the "
    "validation text is the same.",
    "validation set": "The validation sets differ: their losses do not compare, nor bits per byte.",
    "data": "The training data differ.",
}
# Of a difference of scores, by whether it exceeds its error.
REMARKS = {True: ", more than its error", False: ", within its error", None: ""}
Rows = list[dict[str, Any]]  # each with its `name` or `tokens`, and the `values` of the runs


def run_compare(parser: Parser) -> None:
    """Compare runs as text, JSON or a page."""
    parser.description = (
        "Compare runs by the files in their folders: settings and setup that differ, figures, "
        "losses at equal tokens, and scores on tasks with the error of their difference. A change "
        "in brackets is that from the first run."
    )
    parser.examples = ("runs/one runs/two", "one two --page comparison.html")
    names = "two or more runs: folders, or names in runs/"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=names)
    add = parser.group("output")
    add("--page FILE", "write an HTML page with the curves of all, as monitor --page", type=Path)
    add_json(parser)
    arguments = parser.read()
    from refocused.monitor.run_reader import RunReader
    from refocused.monitor.screen.summary import write_page

    folders = [find_run(name, option=None) for name in arguments.runs]
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise ConfigError(f"{' and '.join(arguments.runs)}: name two or more different runs.")
    views: dict[Path, RunView] = {}
    for folder in folders:
        views[folder] = view = RunReader(folder, saved_steps=whole_steps).read(time.time())
        if view.state is None and not (view.settings or view.steps):
            raise ConfigError(f"{folder} holds no run: it has neither state.json nor run.yaml.")
    record = compare_runs(views)
    for warning in record["warnings"]:
        print_message("warning", warning)
    print_result(record, _lines(record), as_json=arguments.json)
    if (page := arguments.page) is not None:
        write_picture(lambda file: write_page(views, file), page, option="--page")
        print_message("hint", f"{page} shows the curves.")


def compare_runs(views: Mapping[Path, RunView]) -> dict[str, Any]:
    """Return what differs between runs, for JSON; `values` are in the order of the runs.

    Losses are left out where they mean different things: per token of another tokenizer, or on
    another validation set.
    """
    from refocused.checkpoints.resume.changes import differences
    from refocused.monitor.screen.summary import read_report

    def rows_of(tables: Sequence[Mapping[str, Any]], *apart: str) -> Rows:
        """Return what differs between tables, but for the names that stand elsewhere."""
        different = [row.name for other in tables for row in differences(tables[0], other)]
        names = [name for name in dict.fromkeys(different) if name not in apart]
        return [{"name": name, "values": [table.get(name) for table in tables]} for name in names]

    reports = {folder: read_report(folder, view) for folder, view in views.items()}
    warnings = list[str]()
    for folder, report in reports.items():
        warnings += [f"{folder}: {text}." for text in report["damage"]]
        if not views[folder].steps:
            warnings.append(f"{folder} has no step yet: there are no losses to compare.")
    names = ("measured_on", "rows", "setup", "scores")
    of_all = {name: [report[name] for report in reports.values()] for name in names}
    differs = {
        what: len({measured_on[what] for measured_on in of_all["measured_on"]} - {None}) > 1
        for what in WARNINGS
    }
    differs["validation set"] &= not differs["tokenizer"]
    warnings += [WARNINGS[what] for what in WARNINGS if differs[what]]
    training, validation = (
        [_curve(getattr(view, name)) for view in views.values()]
        for name in ("steps", "validations")
    )
    is_comparable = not differs["tokenizer"] and all(training)
    validates = is_comparable and not differs["validation set"]
    figures = rows_of([dict(rows) for rows in of_all["rows"]])
    return {
        "warnings": warnings,
        "runs": [{"run": str(folder), **view.as_record()} for folder, view in views.items()],
        "settings": rows_of([view.settings for view in views.values()], "run.name"),
        "setup": rows_of([dict(rows) for rows in of_all["setup"]], "command"),
        "figures": [row for row in figures if row["name"] not in ("goodput", *of_all["scores"][0])],
        "training_losses": at_tenths(training) if is_comparable else [],
        "validation_losses": at_validations(validation) if validates else [],
        "scores": compare_scores(of_all["scores"]),
    }


def _curve(points: Sequence[Any]) -> list[tuple[int, float]]:
    """Return tokens and losses of steps, of each the mean since the one before, or validations."""
    curve = [(point.tokens, getattr(point, "loss_mean", None) or point.loss) for point in points]
    return [(tokens, loss) for tokens, loss in curve if tokens and loss is not None]


def at_tenths(curves: Sequence[Sequence[tuple[int, float]]]) -> Rows:
    """Return the mean losses of each tenth of the shortest run, by the tokens at its end."""
    end, rows = min(curve[-1][0] for curve in curves), Rows()
    for tenth in range(1, ROWS + 1):
        losses = [
            [loss for tokens, loss in curve if tenth - 1 < tokens * ROWS / end <= tenth]
            for curve in curves
        ]
        if all(losses):
            means = [fmean(known) for known in losses]
            rows.append({"tokens": round(end * tenth / ROWS), "values": means})
    return rows


def at_validations(curves: Sequence[Sequence[tuple[int, float]]]) -> Rows:
    """Return the losses of the validations that all runs made at equal tokens, or of some."""
    losses = [dict(curve) for curve in curves]
    places = sorted(set.intersection(*map(set, losses)), reverse=True)
    shown = places[:: math.ceil(len(places) / ROWS) or 1]  # the last one, too
    return [{"tokens": at, "values": [known[at] for known in losses]} for at in shown[::-1]]


def compare_scores(scores: Sequence[Mapping[str, tuple[float, float | None]]]) -> Rows:
    """Return the scores that all runs have, with their differences from the first run's.

    The error of a difference is that of independent items; on the same items it is smaller.
    """
    rows = Rows()
    for name in (name for name in scores[0] if all(name in of_run for of_run in scores)):
        (first, first_error), *others = values = [of_run[name] for of_run in scores]
        changes = list[dict[str, Any]]()
        for value, error in others:
            both = None
            if error is not None and first_error is not None:
                both = math.hypot(error, first_error)
            exceeds = None if both is None else abs(value - first) > both
            changes.append({"value": value - first, "error": both, "exceeds_error": exceeds})
        rows.append({"name": name, "values": values, "changes": changes})
    return rows


def _lines(record: Mapping[str, Any]) -> list[str]:
    """Return a comparison as text."""
    from refocused.monitor.screen.summary import score_text

    tables = {}
    for what in ("settings", "setup", "figures"):
        unknown = "null" if what == "settings" else "-"
        tables[f"{what} that differ"] = [
            [
                row["name"],
                *(unknown if each is None else setting_text(each) for each in row["values"]),
            ]
            for row in record[what]
        ]
    titles = {
        "training_losses": "mean training losses up to",
        "validation_losses": "validation losses at",
    }
    for what, title in titles.items():
        rows = tables[f"{title} so many tokens"] = []
        for row in record[what]:
            first, *others = row["values"]
            cells = [f"{loss:.4f} ({loss - first:+.4f})" for loss in others]
            rows.append([f"{row['tokens']:,}", f"{first:.4f}", *cells])
    rows = tables["scores"] = []
    for row in record["scores"]:
        first, *others = map(score_text, row["values"])
        cells = [
            f"{score} ({change['value']:+.4f}{known(' +- {:.4f}', change['error'])}"
            f"{REMARKS[change['exceeds_error']]})"
            for score, change in zip(others, row["changes"], strict=True)
        ]
        rows.append([row["name"], first, *cells])
    runs = [run["run"] for run in record["runs"]]
    lines = [f"{run['run']}: {run['status']}" for run in record["runs"]]
    for title, rows in tables.items():
        lines += ["", title, *table(rows, "", *runs, indent=2)] if rows else ["", f"{title}: none"]
    return lines
