"""`evaluate MODEL`, `evaluate compare`: scores on tasks and texts, or validation losses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser, add_tokenizer_options, bucket_at, tokenizer_choice
from refocused.commands.output import check_picture, count, print_result, table, write_picture
from refocused.commands.run_selection import add_run_options, list_steps, model_source, run_choice
from refocused.system.errors import CheckpointError, ConfigError
from refocused.system.launchers import complete_environment
from refocused.system.number_text import duration

if TYPE_CHECKING:
    from refocused.evaluate.evaluation import Evaluated
    from refocused.evaluate.multiple_choice import Measure
    from refocused.evaluate.tasks import TaskFile
    from refocused.system.world import World


TASKS_HELP = (
    "comma-separated: hellaswag, piqa, arc_easy, arc_challenge, lambada, multiple_choice, "
    "perplexity or core (DCLM's unpacked bundle), found in --data or given as NAME=FILE, "
    "core=FOLDER; or a file: .jsonl (ctx, endings, label; query, choices, gold; or context, "
    "continuation), or .txt for perplexity"
)


def add_model_options(parser: Parser) -> None:
    """Add the options of tasks, device, precision, tokenizer and run."""
    add = parser.group("tasks")
    add("--tasks NAMES", TASKS_HELP)
    add("--data DIR", "folder of the tasks' files", type=Path)
    limit = "use the first N items, or sequences of a text; of core, N drawn from each task"
    add("--limit N", limit, type=count)
    add("--context N", "tokens of context (default: the length it was trained on)", type=count)
    add("--stride N", "new tokens of each sequence of a text (default: the context)", type=count)
    add = parser.group("compute")
    add("--batch N", "endings or sequences at once", type=count, default=16)
    add("--device", "where to compute", choices=("auto", "cuda", "cpu"), default="auto")
    add_dtype_option(parser)
    add("--local-rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it
    add_tokenizer_options(parser)
    add_run_options(parser)


def add_dtype_option(parser: Parser) -> None:
    """Add the precision of a model."""
    usual = "type to compute in (default: bf16 on GPUs that support it, else fp16; fp32 on CPUs)"
    parser.group("compute")("--dtype", usual, choices=("bf16", "fp16", "fp32"))


def run_evaluate(parser: Parser) -> None:
    """Score a model and print the results."""
    parser.epilog = (
        "Without --tasks: measure loss and bits per byte on the validation set of the model's run. "
        "To compare models, see `evaluate compare --help`. To use several GPUs: "
        "deepspeed --num_gpus N --module refocused evaluate ..."
    )
    parser.examples = ("best --run demo", "best --tasks hellaswag,piqa --data data/tasks")
    kinds = "a run, latest, best, a step, a path, a gs:// address, or a transformers folder"
    parser.add_argument("model", metavar="MODEL", help=kinds)
    add_model_options(parser)
    parser.group("compute")("--untrained", "random weights, for the scores of chance")
    arguments = parser.read()
    if arguments.tasks is None:
        of_tasks = ("data", "context", "stride", "tokenizer", "bpe_folder")
        parser.refuse(arguments, "needs --tasks", *of_tasks)
    world = ranks(arguments.device)
    tasks = world.on_all_ranks(lambda: tasks_of(arguments))
    evaluation = evaluated(
        arguments.model, arguments, tasks, world, is_untrained=arguments.untrained
    )
    if world.is_rank_0:
        record = {**evaluation.head, "tasks": evaluation.records()}
        print_result(record, _lines(evaluation), as_json=arguments.json)
    if world.world_size > 1:
        world.leave()


def tasks_of(arguments: argparse.Namespace) -> list[TaskFile]:
    """Return the tasks of `--tasks`, or none without it."""
    from refocused.evaluate.tasks import find_tasks

    if arguments.tasks is None:
        return []
    requests = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    if not requests:
        raise ConfigError("--tasks: name at least one, such as hellaswag=FILE.jsonl or FILE.txt.")
    return find_tasks(requests, data=arguments.data)


def ranks(device: str) -> World:
    """Join the ranks of a launcher, or be the only rank."""
    complete_environment(os.environ)
    import torch

    from refocused.system.world import World, choose_device, join_world

    if os.environ.get("WORLD_SIZE", "1") != "1":
        return join_world(device)
    kind = choose_device(device, local_world_size=1, gpus=torch.cuda.device_count())
    return World(device_kind=kind)


def evaluated(
    request: str,
    arguments: argparse.Namespace,
    tasks: Sequence[TaskFile],
    world: World,
    *,
    is_untrained: bool = False,
    label: str = "",
) -> Evaluated:
    """Evaluate a model as the command line asks; `label` is the start of the progress line."""
    from refocused.evaluate.evaluation import evaluate_model
    from refocused.evaluate.load_model import usual_dtype

    def show(task: str, done: int, total: int) -> None:
        """Show progress on a terminal, until the last batch."""
        if world.is_rank_0 and sys.stderr.isatty():
            text = f"{label}{task} {done:,}/{total:,}"
            sys.stderr.write(f"\r{text}" if done < total else f"\r{' ' * len(text)}\r")
            sys.stderr.flush()

    return evaluate_model(
        world.on_rank_0(lambda: model_source(request, run_choice(arguments))),
        tasks,
        world,
        dtype=arguments.dtype or usual_dtype(str(world.device)),
        tokenizer=tokenizer_choice(arguments),
        is_untrained=is_untrained,
        **{name: getattr(arguments, name) for name in ("limit", "batch", "context", "stride")},
        open_source=lambda url: bucket_at(url, arguments),
        progress=show,
    )


def _lines(evaluation: Evaluated) -> list[str]:
    head = evaluation.head
    step = f", step {head['step']:,}" if "step" in head else ""
    step = step or ("" if head["trained"] else ", untrained")
    several = f", {head['ranks']} ranks" if head["ranks"] > 1 else ""
    lines = [
        f"{head['model']}{step}: {head['parameters']:,} parameters, context "
        f"{head['context_tokens']:,}, {head['dtype']} on {head['device']}{several}"
    ]
    width = max(len(result.task) for result in evaluation.results)
    for result in evaluation.results:
        parts = [f"{result.task:<{width}}", f"{result.items:>6,} items"]
        parts += [f"{name} {measure_text(measure)}" for name, measure in result.in_line.items()]
        parts.append(f"{duration(result.seconds or 0.0)} ({result.items_per_second:,.1f}/s)")
        if result.cut:
            parts.append(f"{result.cut:,} contexts cut from the left")
        if result.skipped:
            what = "an ending is too long, or has no token of its own"
            parts.append(f"{result.skipped:,} skipped: {what}")
        lines.append("  ".join(parts))
        below = {name: each for name, each in result.measures.items() if name not in result.in_line}
        names = max(map(len, below), default=0)
        lines += [f"  {name:<{names}}  {measure_text(measure)}" for name, measure in below.items()]
    return lines


def measure_text(measure: Measure) -> str:
    """Format a number with its standard error."""
    error = measure.standard_error
    return f"{measure.value:.4f}" + ("" if error is None else f" +- {error:.4f}")


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

    def usable_steps() -> list[str]:
        listing = list_steps(run_choice(arguments))
        arguments.run = str(listing.run)
        steps = [str(entry.step) for entry in listing.entries if entry.usable and entry.is_present]
        if not steps:
            raise CheckpointError(
                f"{listing.run} has no usable checkpoint. Name models, or another --run."
            )
        return steps

    requests = arguments.models or world.on_rank_0(usable_steps)
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
            for name, measure in result.in_line.items()
        }
        for request, evaluation in evaluations.items()
    }
    names = list(dict.fromkeys(name for measures in scores.values() for name in measures))
    rows = [
        [request, *(measure_text(measures[name]) if name in measures else "-" for name in names)]
        for request, measures in scores.items()
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


def steps_of_one_run(evaluations: Mapping[str, Evaluated]) -> dict[str, int]:
    """Return the step of each model; empty unless all are of one run."""
    runs = {evaluation.head.get("run") for evaluation in evaluations.values()}
    if len(runs) > 1 or None in runs:
        return {}
    return {request: evaluation.head["step"] for request, evaluation in evaluations.items()}


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
