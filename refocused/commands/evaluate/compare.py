"""`evaluate compare`: compare models, or the checkpoints of a run, by their scores."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser
from refocused.commands.evaluate.model import (
    Evaluated,
    add_model_options,
    evaluated,
    measure_text,
    ranks,
    tasks_of,
)
from refocused.commands.output import check_picture, print_result, table, write_picture
from refocused.commands.run_selection import list_steps, run_choice
from refocused.system.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from refocused.evaluate.multiple_choice import Measure


def run_compare(parser: Parser) -> None:
    """Score models, or every checkpoint of a run if no model is named; ranks share the work."""
    parser.examples = ("model_a model_b --tasks piqa --data tasks", "--run demo --tasks story.txt")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="as for evaluate")
    parser.group("output")("--picture --out FILE.png", "draw the scores", type=Path)
    add_model_options(parser)
    arguments = parser.read()
    check_picture(arguments.picture)
    if arguments.tasks is None:
        raise ConfigError(
            "compare: name what to compare by: --tasks, such as hellaswag=FILE.jsonl."
        )
    world = ranks(arguments.device)
    tasks = world.on_all_ranks(lambda: tasks_of(arguments))
    requests = arguments.models or world.on_rank_0(lambda: _steps_of_run(arguments))
    evaluations = {
        request: evaluated(request, arguments, tasks, world, label=f"{request} ")
        for request in requests
    }
    world.on_rank_0(lambda: _print_scores(evaluations, arguments))
    if world.world_size > 1:
        world.leave()


def _print_scores(evaluations: Mapping[str, Evaluated], arguments: argparse.Namespace) -> None:
    """Print a row for each model, and draw them if `--picture` names a file."""
    scores = {
        request: {
            f"{result.task} {name}": measure
            for result in evaluation.results
            for name, measure in result.measures.items()
        }
        for request, evaluation in evaluations.items()
    }
    names = list(dict.fromkeys(name for measures in scores.values() for name in measures))
    rows = [
        [request, *(measure_text(own[name]) if name in own else "-" for name in names)]
        for request, own in scores.items()
    ]
    models = [
        {"model": request, "step": evaluation.head.get("step"), "tasks": evaluation.records()}
        for request, evaluation in evaluations.items()
    ]
    file = arguments.picture
    picture = {} if file is None else {"picture": str(file)}
    lines = table(rows, "MODEL", *names)
    print_result({**picture, "models": models}, lines, as_json=arguments.json)
    if file is not None and names:
        steps = steps_of_one_run(evaluations)
        write_picture(lambda file: draw_scores(scores, file, steps=steps), file)
        if not arguments.json:
            print(f"{file}: drawn")


def _steps_of_run(arguments: argparse.Namespace) -> list[str]:
    listing = list_steps(run_choice(arguments))
    arguments.run = str(listing.run)
    steps = [str(entry.step) for entry in listing.entries if entry.usable and entry.is_present]
    if not steps:
        raise CheckpointError(
            f"{listing.run} has no usable checkpoint. Name models, or another --run."
        )
    return steps


def steps_of_one_run(found: Mapping[str, Evaluated]) -> dict[str, int]:
    """Return the step of each model; empty unless all are of one run."""
    runs = {one.head.get("run") for one in found.values()}
    if len(runs) > 1 or None in runs:
        return {}
    return {request: one.head["step"] for request, one in found.items()}


def draw_scores(
    rows: Mapping[str, Mapping[str, Measure]], file: Path, *, steps: Mapping[str, int]
) -> None:
    """Write a PNG with each measure over the models' steps; over their names without steps."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for measures in rows.values() for name in measures))
    over_steps = len(set(steps.values())) == len(rows)
    lines = (len(names) + 1) // 2
    figure = Figure(figsize=(11, 4 * lines), layout="constrained")
    panels = list(figure.subplots(lines, 2, squeeze=False).flat)
    for axes in panels[len(names) :]:
        axes.remove()
    for axes, name in zip(panels, names, strict=False):
        known = {model: measures[name] for model, measures in rows.items() if name in measures}
        axes.errorbar(
            [steps[model] if over_steps else model for model in known],
            [measure.value for measure in known.values()],
            yerr=[measure.standard_error or 0.0 for measure in known.values()],
            marker="o",
            capsize=3,
            linestyle="-" if over_steps else "",
        )
        axes.grid(alpha=0.3)
        axes.set(title=name, xlabel="step" if over_steps else "model")
        axes.tick_params(axis="x", labelrotation=0 if over_steps else 30)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=120)
