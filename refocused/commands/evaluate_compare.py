"""`evaluate compare`: models side by side, by tasks or by their speed."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser
from refocused.commands.evaluate_model import Evaluated, evaluated, records
from refocused.commands.evaluation_options import (
    add_machine_options,
    add_task_options,
    dtype_of,
    measure_text,
    ranks,
    tasks_of,
)
from refocused.commands.run_selection import add_run_options, list_steps, model_source
from refocused.system.errors import CheckpointError, ConfigError, ExitCode, RefocusedError

if TYPE_CHECKING:
    from refocused.evaluate.comparison import SpeedRow
    from refocused.evaluate.model_weights import Dtype
    from refocused.evaluate.multiple_choice import Measure
    from refocused.evaluate.score_model import TimedResult
    from refocused.system.world import World


def run_compare(parser: Parser) -> int:
    """Compare by tasks, or by speed where none is named."""
    parser.epilog = (
        "With --tasks: scores of the models, of all steps of a run when none is named, and their "
        "curve; several ranks share the work. Without: speed, on one rank, also of names in "
        "config/models, with random weights."
    )
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help="as for evaluate, or a name in config/models")
    add("--lengths", type=_numbers, default=[128, 512], metavar="N,N", help="tokens (128,512)")
    add("--batches", type=_numbers, default=[1, 4], metavar="N,N", help="prompts at once (1,4)")
    add("--new-tokens", type=int, default=16, metavar="N", help="tokens to write; 0: none (16)")
    add("--picture", "--out", type=Path, metavar="FILE.png", help="draw the comparison")
    add_task_options(parser)
    add_machine_options(parser)
    add_run_options(parser)
    arguments = parser.read()
    check_picture(arguments.picture)
    return _by_speed(arguments) if arguments.tasks is None else _by_tasks(arguments)


def check_picture(file: Path | None) -> None:
    """Refuse a picture that is no PNG.

    Raises:
        ConfigError: Its name does not end in .png.
    """
    if file is not None and file.suffix.lower() != ".png":
        raise ConfigError(f"--picture {file}: give it a name that ends in .png.")


def draw_picture(draw: Callable[[Path], None], arguments: argparse.Namespace) -> None:
    """Draw what was measured and printed, if `--picture` names a file."""
    file = arguments.picture
    if file is None:
        return
    try:
        draw(file)
    except OSError as error:
        raise RefocusedError(
            f"{file} cannot be written ({error.strerror}). Name another file with --picture."
        ) from None
    if not arguments.json:
        print(f"{file}: drawn")


def picture_record(arguments: argparse.Namespace) -> dict[str, str]:
    """Return what JSON says of the picture; empty without one."""
    return {} if arguments.picture is None else {"picture": str(arguments.picture)}


def _by_tasks(arguments: argparse.Namespace) -> int:
    world = ranks(arguments.device)
    tasks = world.on_all_ranks(lambda: tasks_of(arguments))
    requests = arguments.models or world.on_rank_0(lambda: _steps_of_run(arguments))
    found = {
        request: evaluated(request, arguments, tasks, world=world, label=f"{request} ")
        for request in requests
    }
    world.on_rank_0(lambda: _show_scores(found, arguments))
    if world.world_size > 1:
        world.leave()
    return ExitCode.OK


def _show_scores(found: Mapping[str, Evaluated], arguments: argparse.Namespace) -> None:
    """Print all scores, then draw them."""
    from refocused.evaluate.comparison import draw_scores

    rows = {request: _measures(one.results) for request, one in found.items()}
    if arguments.json:
        models = [
            {"model": request, "step": one.head.get("step"), "tasks": records(one.results)}
            for request, one in found.items()
        ]
        print(json.dumps(picture_record(arguments) | {"models": models}, indent=1))
    else:
        for line in _table(_score_lines(rows)):
            print(line)
    if any(rows.values()):  # else every item was skipped
        steps = steps_of_one_run(found)
        draw_picture(lambda file: draw_scores(rows, file, steps=steps), arguments)


def steps_of_one_run(found: Mapping[str, Evaluated]) -> dict[str, int]:
    """Return the step of each model; none where they are not all of one run: that is no curve."""
    runs = {one.head.get("run") for one in found.values()}
    if len(runs) > 1 or None in runs:
        return {}
    return {request: one.head["step"] for request, one in found.items()}


def _steps_of_run(arguments: argparse.Namespace) -> list[str]:
    listing = list_steps(arguments)
    run = arguments.run = str(listing.run)
    steps = [str(entry.step) for entry in listing.entries if entry.usable and entry.is_present]
    if not steps:
        raise CheckpointError(f"{run} has no whole step to compare. Name models, or another --run.")
    return steps


def _measures(results: Sequence[TimedResult]) -> dict[str, Measure]:
    return {
        f"{timed.result.task} {name}": measure
        for timed in results
        for name, measure in timed.result.measures.items()
    }


def _score_lines(rows: Mapping[str, Mapping[str, Measure]]) -> list[list[str]]:
    names = list(dict.fromkeys(name for measures in rows.values() for name in measures))
    lines = [
        [request, *(measure_text(found[name]) if name in found else "-" for name in names)]
        for request, found in rows.items()
    ]
    return [["MODEL", *names], *lines]


def _by_speed(arguments: argparse.Namespace) -> int:
    from refocused.evaluate.comparison import draw_speed, measure_speed

    if not arguments.models:
        raise ConfigError(
            "compare: name models, as gpt2_124m ten_small; or with --tasks the steps of a run."
        )
    world = ranks(arguments.device)
    world.on_all_ranks(lambda: _refuse_several(world))
    rows: list[SpeedRow] = []
    for request in arguments.models:
        network = network_of(
            request, arguments, dtype=dtype_of(arguments, world), device=str(world.device)
        )
        rows += measure_speed(
            request,
            network,
            lengths=arguments.lengths,
            batches=arguments.batches,
            new_tokens=arguments.new_tokens,
        )
        del network
    if arguments.json:
        content = picture_record(arguments) | {"device": world.device_name}
        print(json.dumps(content | {"rows": [dataclasses.asdict(row) for row in rows]}, indent=1))
    else:
        heading = ["MODEL", "PARAMETERS", "LENGTH", "BATCH", "LATENCY", "READ", "WRITTEN", "MEMORY"]
        for line in _table([heading, *map(_speed_line, rows)]):
            print(line)
        print(f"{dtype_of(arguments, world)} on {world.device_name}")
    draw_picture(lambda file: draw_speed(rows, file), arguments)
    return ExitCode.OK


def _refuse_several(world: World) -> None:
    """Refuse to measure speed on ranks that would take the machine from each other.

    Raises:
        ConfigError: There are several.
    """
    if world.world_size > 1:
        raise ConfigError(
            f"compare: speed is measured by one process, and {world.world_size} ranks would share "
            "cores and memory while they do. Start launch/evaluate.py without a launcher, or "
            "compare by --tasks, which ranks share."
        )


def network_of(
    request: str, arguments: argparse.Namespace, *, dtype: Dtype, device: str = "cpu"
) -> Any:
    """Load a model without its tokenizer, or make one of a shape in config/models."""
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


def _speed_line(row: SpeedRow) -> list[str]:
    def text(value: float | None, form: str, unit: str) -> str:
        return "-" if value is None else f"{value:{form}} {unit}"

    return [
        row.model,
        f"{row.parameters:,}",
        f"{row.length:,}",
        f"{row.batch:,}",
        text(row.latency_seconds, ".3f", "s"),
        text(row.tokens_per_second, ",.0f", "tok/s"),
        text(row.written_per_second, ",.1f", "tok/s"),
        text(row.memory_gib, ".3f", "GiB"),
    ]


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers from 1 are wanted, as 128,512")
    return numbers
