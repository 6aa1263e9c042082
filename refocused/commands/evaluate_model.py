"""`evaluate MODEL`: tasks and texts put to one model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser
from refocused.commands.evaluation_options import (
    BatchLine,
    add_machine_options,
    add_task_options,
    dtype_of,
    ranks,
    result_line,
    settings_of,
    tasks_of,
    tokenizer_choice,
)
from refocused.commands.run_selection import add_run_options, model_source
from refocused.system.errors import ExitCode

if TYPE_CHECKING:
    from refocused.evaluate.load_model import LoadedModel
    from refocused.evaluate.score_model import TimedResult
    from refocused.evaluate.tasks import TaskFile
    from refocused.system.world import World


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """What a model was and did.

    Attributes:
        head: Where it comes from, and how it was asked, as JSON knows it.
        results: Of each task.
    """

    head: Mapping[str, Any]
    results: Sequence[TimedResult]


def run_evaluate(parser: Parser) -> int:
    """Put all tasks to the model."""
    parser.epilog = (
        "Without --tasks: the loss on the validation set of the model's run. `evaluate compare "
        "--help`: several models. On several GPUs: deepspeed --num_gpus N launch/evaluate.py ..."
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run, latest, best, a step, a path, a gs:// address, or a transformers folder",
    )
    parser.add_argument(
        "--untrained", action="store_true", help="of its shape, with random weights: what chance is"
    )
    add_task_options(parser)
    add_machine_options(parser)
    add_run_options(parser)
    arguments = parser.read()
    world = ranks(arguments.device)
    tasks = world.on_all_ranks(lambda: tasks_of(arguments))
    found = evaluated(
        arguments.model, arguments, tasks, world=world, is_untrained=arguments.untrained
    )
    if world.is_rank_0:
        if arguments.json:
            print(json.dumps({**found.head, "tasks": records(found.results)}, indent=1))
        else:
            _print(found.head, found.results)
    if world.world_size > 1:
        world.leave()
    return ExitCode.OK


def evaluated(
    request: str,
    arguments: argparse.Namespace,
    tasks: Sequence[TaskFile],
    *,
    world: World,
    is_untrained: bool = False,
    label: str = "",
) -> Evaluated:
    """Put tasks to one model, or its run's validation set; then it leaves the memory again.

    Args:
        request: As `model_source` takes it.
        arguments: How to load and to ask it.
        tasks: Which; none: the validation set.
        world: The ranks that share the work; all must call.
        is_untrained: Ask one of its shape with random weights.
        label: What the line of progress begins with.

    Raises:
        RefocusedError: On every rank: there is no such model, or it cannot take a task.
    """
    from refocused.evaluate.load_model import load_model, untrained
    from refocused.evaluate.score_model import Evaluation

    source = world.on_rank_0(lambda: model_source(request, arguments))
    dtype = dtype_of(arguments, world)
    model = world.on_all_ranks(
        lambda: load_model(
            source,
            dtype=dtype,
            device=str(world.device),
            tokenizer=tokenizer_choice(arguments),
            without_tokenizer=not tasks,
        )
    )
    model = untrained(model) if is_untrained else model
    if not tasks:
        from refocused.commands.run_validation import measure_validation

        result = measure_validation(model, arguments, world)
        context = model.trained_length or model.network.config.max_position_embeddings
        return Evaluated(_head(model, context, world, dtype), [result])
    evaluation = world.on_all_ranks(lambda: Evaluation(model, settings_of(arguments)))
    warning = model.beyond_training(evaluation.context_tokens)
    if warning is not None and world.is_rank_0:
        print(warning, file=sys.stderr)
    line = BatchLine(speaks=world.is_rank_0)
    results = evaluation.run(
        tasks, world=world, progress=lambda task, *count: line.show(label + task, *count)
    )
    return Evaluated(_head(model, evaluation.context_tokens, world, dtype), results)


def records(results: Sequence[TimedResult]) -> dict[str, Any]:
    """Return results by task, as JSON knows them."""
    return {
        timed.result.task: {
            **timed.result.as_record(),
            "seconds": timed.seconds,
            "items_per_second": timed.items_per_second,
        }
        for timed in results
    }


def _head(model: LoadedModel, context: int, world: World, dtype: str) -> dict[str, Any]:
    return {
        "model": str(model.source),
        **{name: model.facts[name] for name in ("run", "step", "tokens") if name in model.facts},
        "trained": model.is_trained,
        "parameters": model.network.num_parameters(),
        "context_tokens": context,
        "trained_sequence_length": model.trained_length,
        "dtype": dtype,
        "device": world.device_name,
        "ranks": world.world_size,
    }


def _print(head: Mapping[str, Any], results: Sequence[TimedResult]) -> None:
    step = f", step {head['step']:,}" if "step" in head else ""
    step = step or ("" if head["trained"] else ", untrained")
    several = f", {head['ranks']} ranks" if head["ranks"] > 1 else ""
    print(
        f"{head['model']}{step}: {head['parameters']:,} parameters, context "
        f"{head['context_tokens']:,}, {head['dtype']} on {head['device']}{several}"
    )
    width = max(len(timed.result.task) for timed in results)
    for timed in results:
        print(result_line(timed, width=width))
