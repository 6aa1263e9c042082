"""`evaluate compare`, `spectrum`: compare models; show what one without attention remembers."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser
from refocused.commands.evaluate.model import (
    Evaluated,
    add_model_options,
    evaluated,
    measure_text,
    ranks,
    tasks_of,
    usual_dtype,
)
from refocused.commands.output import (
    check_picture,
    counts,
    print_result,
    table,
    whole,
    write_picture,
)
from refocused.commands.run_selection import add_run_options, list_steps, model_source
from refocused.system.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from refocused.evaluate.model_weights import Dtype
    from refocused.evaluate.tasks import TaskFile
    from refocused.system.world import World


def run_compare(parser: Parser) -> None:
    """Compare models by tasks, or by speed without `--tasks`."""
    parser.epilog = (
        "With --tasks: score the models, or every checkpoint of a run if no model is named; "
        "several ranks share the work. Without --tasks: measure speed on one rank; names in "
        "config/models get random weights."
    )
    parser.examples = ("gpt2_tiny demo_gpt2", "--run demo --tasks story.txt --picture scores.png")
    models = "as for evaluate, or a name in config/models"
    parser.add_argument("models", nargs="*", metavar="MODEL", help=models)
    add = parser.group("speed")
    add("--lengths N,N", "tokens of a prompt", type=counts, default=[128, 512])
    add("--batches N,N", "prompts at once", type=counts, default=[1, 4])
    add("--new-tokens N", "tokens to generate; 0: none", type=whole, default=16)
    parser.group("output")("--picture --out FILE.png", "draw the scores, with --tasks", type=Path)
    add_model_options(parser)
    arguments = parser.read()
    check_picture(arguments.picture)
    if arguments.tasks is None:
        of_scores = ("picture", "data", "limit", "context", "stride", "batch", "tokenizer")
        parser.refuse(arguments, "needs --tasks", *of_scores)
    else:
        parser.refuse(arguments, "has no effect with --tasks", "lengths", "batches", "new_tokens")
    if arguments.tasks is None and not arguments.models:
        raise ConfigError(
            "compare: name models, such as gpt2_124m ten_small, or name --tasks to compare the "
            "checkpoints of a run."
        )
    world = ranks(arguments.device)
    if arguments.tasks is None:
        _compare_speed(arguments, world)
        return
    tasks = world.on_all_ranks(lambda: tasks_of(arguments))
    _compare_scores(arguments, tasks, world)
    if world.world_size > 1:
        world.leave()


def _print(
    record: dict[str, Any],
    lines: Sequence[str],
    draw: Callable[[Path], None] | None,
    arguments: argparse.Namespace,
) -> None:
    """Print the results, and draw them if `--picture` names a file."""
    file = arguments.picture
    picture = {} if file is None else {"picture": str(file)}
    print_result(picture | record, lines, as_json=arguments.json)
    if file is not None and draw is not None:
        write_picture(draw, file)
        if not arguments.json:
            print(f"{file}: drawn")


def _compare_scores(arguments: argparse.Namespace, tasks: Sequence[TaskFile], world: World) -> None:
    from refocused.evaluate.comparison import draw_scores

    requests = arguments.models or world.on_rank_0(lambda: _steps_of_run(arguments))
    found = {
        request: evaluated(request, arguments, tasks, world, label=f"{request} ")
        for request in requests
    }
    scores = {
        request: {
            f"{result.task} {name}": measure
            for result in one.results
            for name, measure in result.measures.items()
        }
        for request, one in found.items()
    }
    names = list(dict.fromkeys(name for measures in scores.values() for name in measures))
    rows = [
        [request, *(measure_text(own[name]) if name in own else "-" for name in names)]
        for request, own in scores.items()
    ]
    models = [
        {"model": request, "step": one.head.get("step"), "tasks": one.records()}
        for request, one in found.items()
    ]
    draw = functools.partial(draw_scores, scores, steps=steps_of_one_run(found)) if names else None
    lines = table(rows, "MODEL", *names)
    world.on_rank_0(lambda: _print({"models": models}, lines, draw, arguments))


def _steps_of_run(arguments: argparse.Namespace) -> list[str]:
    listing = list_steps(arguments)
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


def _compare_speed(arguments: argparse.Namespace, world: World) -> None:
    from refocused.evaluate.comparison import measure_speed

    if world.world_size > 1:
        raise ConfigError(
            f"compare: speed is measured by one process, and {world.world_size} ranks would share "
            "cores and memory while they do. Start it without a launcher, or "
            "compare by --tasks, which ranks share."
        ).agreed()
    dtype = arguments.dtype or usual_dtype(str(world.device))
    rows = []
    for request in arguments.models:
        network = _network(request, arguments, dtype=dtype, device=str(world.device))
        options = {name: getattr(arguments, name) for name in ("lengths", "batches", "new_tokens")}
        rows += [dataclasses.asdict(row) for row in measure_speed(request, network, **options)]
        del network
    cells = [
        [
            "-" if row[name] is None else form.format(row[name])
            for name, (_, form) in COLUMNS.items()
        ]
        for row in rows
    ]
    lines = table(cells, *(heading for heading, _ in COLUMNS.values()))
    record = {"device": world.device_name, "rows": rows}
    print_result(record, [*lines, f"{dtype} on {world.device_name}"], as_json=arguments.json)


COLUMNS = {  # field of SpeedRow: its heading and how it is printed
    "model": ("MODEL", "{}"),
    "parameters": ("PARAMETERS", "{:,}"),
    "length": ("LENGTH", "{:,}"),
    "batch": ("BATCH", "{:,}"),
    "latency_seconds": ("LATENCY", "{:.3f} s"),
    "tokens_per_second": ("READ", "{:,.0f} tok/s"),
    "written_per_second": ("WRITTEN", "{:,.1f} tok/s"),
    "memory_gib": ("MEMORY", "{:.3f} GiB"),
}


def _network(
    request: str, arguments: argparse.Namespace, *, dtype: Dtype, device: str = "cpu"
) -> Any:
    """Load a model without its tokenizer, or build one from a shape in config/models."""
    import torch

    from refocused.config.load_run import find_config
    from refocused.config.model_shape import load_shape
    from refocused.evaluate.comparison import random_network
    from refocused.evaluate.load_model import load_model

    try:
        file = find_config("models", request)
    except ConfigError:
        source = model_source(request, arguments)
        return load_model(source, dtype=dtype, device=device, without_tokenizer=True).network
    torch.manual_seed(0)
    return random_network(load_shape(file), dtype=dtype).to(device)


def run_spectrum(parser: Parser) -> None:
    """Print the shortest, median and longest horizon of every part; draw them if requested."""
    parser.epilog = (
        "The horizon of a mode is the number of tokens after which it has forgotten 63 % of its "
        "input; on a scale of s tokens it is counted in tokens of that scale."
    )
    parser.examples = ("ten_nano", "runs/ten --picture spectrum.png")
    model = "as for evaluate, or a name in config/models"
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.group("output")("--picture --out FILE.png", "draw the horizons", type=Path)
    add_run_options(parser)
    arguments = parser.read()
    check_picture(arguments.picture)
    from refocused.evaluate.comparison import draw_spectrum, spectra

    modules = spectra(_network(arguments.model, arguments, dtype="fp32"))
    parts: list[dict[str, Any]] = [{"part": one.name, **one.summary()} for one in modules]
    rows = []
    for part in parts:
        horizons = [f"{part[f'{name}_tokens']:,.1f}" for name in ("shortest", "median", "longest")]
        turns = [f"{part[f'{name}_frequency']:.2g}" for name in ("lowest", "median", "highest")]
        rows.append((part["part"], str(part["modes"]), " ".join(horizons), " ".join(turns)))
    lines = table(rows, "PART", "MODES", "HORIZON IN TOKENS", "RADIANS A TOKEN")
    draw = functools.partial(draw_spectrum, modules, title=arguments.model)
    _print({"parts": parts}, lines, draw, arguments)
