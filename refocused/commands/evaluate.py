"""`evaluate MODEL`, `evaluate compare`: scores on tasks and texts, or validation losses."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser, add_tokenizer_options, bucket_at, tokenizer_choice
from refocused.commands.output import check_picture, count, print_result, table, write_picture
from refocused.commands.run_selection import add_run_options, list_steps, model_source, run_choice
from refocused.system.errors import CheckpointError, ConfigError
from refocused.system.launchers import complete_environment
from refocused.system.logs import print_message
from refocused.system.number_text import duration

if TYPE_CHECKING:
    from refocused.config.optimization import Dtype
    from refocused.evaluate.load_model import LoadedModel
    from refocused.evaluate.multiple_choice import Measure, TaskResult
    from refocused.evaluate.tasks import TaskFile
    from refocused.system.world import World


TASKS_HELP = (
    "comma-separated: hellaswag, piqa, arc_easy, arc_challenge, lambada, multiple_choice or "
    "perplexity, found in --data or given as NAME=FILE; or a file: .jsonl (ctx, endings, label; "
    "query, choices, gold; or context, continuation), or .txt for perplexity"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """Facts about a model and its measurement, for JSON, and the results of each task."""

    head: Mapping[str, Any]
    results: Sequence[TaskResult]

    def records(self) -> dict[str, Any]:
        """Return the results by task, for JSON."""
        return {one.task: one.as_record() for one in self.results}


def add_model_options(parser: Parser) -> None:
    """Add the options of tasks, device, precision, tokenizer and run."""
    add = parser.group("tasks")
    add("--tasks NAMES", TASKS_HELP)
    add("--data DIR", "folder of the tasks' files", type=Path)
    add("--limit N", "use the first N items, or sequences of a text", type=count)
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
        "Without --tasks: measure the loss on the validation set of the model's run. To compare "
        "models, see `evaluate compare --help`. To use several GPUs: "
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


def usual_dtype(device: str) -> Dtype:
    """Return the default precision of a device."""
    import torch

    from refocused.estimate.memory_plan import native_dtype

    if not device.startswith("cuda"):
        return "fp32"
    return native_dtype(capability=torch.cuda.get_device_capability(device)).dtype


def evaluated(
    request: str,
    arguments: argparse.Namespace,
    tasks: Sequence[TaskFile],
    world: World,
    *,
    is_untrained: bool = False,
    label: str = "",
) -> Evaluated:
    """Score a model, then free its memory; every rank must call.

    Without tasks, measure the loss on the validation set of its run. `is_untrained` gives it random
    weights. `label` is the start of the progress line. Errors are raised on every rank.
    """
    from refocused.evaluate.load_model import load_model, untrained
    from refocused.evaluate.score_model import Evaluation

    source = world.on_rank_0(lambda: model_source(request, run_choice(arguments)))
    dtype = arguments.dtype or usual_dtype(str(world.device))
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
        result = measure_validation(model, arguments, world)
        context = model.trained_length or model.network.config.max_position_embeddings
        return Evaluated(_head(model, context, world, dtype), [result])
    names = ("limit", "batch", "context", "stride")
    settings = {name: getattr(arguments, name) for name in names}
    evaluation = world.on_all_ranks(lambda: Evaluation(model, **settings))
    warning = model.beyond_training(evaluation.context_tokens)
    if warning is not None and world.is_rank_0:
        print_message("warning", warning)

    def show(task: str, done: int, total: int) -> None:
        """Show progress on a terminal, until the last batch."""
        if world.is_rank_0 and sys.stderr.isatty():
            text = f"{label}{task} {done:,}/{total:,}"
            sys.stderr.write(f"\r{text}" if done < total else f"\r{' ' * len(text)}\r")
            sys.stderr.flush()

    results = evaluation.run(tasks, world=world, progress=show)
    return Evaluated(_head(model, evaluation.context_tokens, world, dtype), results)


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
        parts += [f"{name} {measure_text(measure)}" for name, measure in result.measures.items()]
        parts.append(f"{duration(result.seconds or 0.0)} ({result.items_per_second:,.1f}/s)")
        if result.cut:
            parts.append(f"{result.cut:,} contexts cut from the left")
        if result.skipped:
            what = "an ending is too long, or has no token of its own"
            parts.append(f"{result.skipped:,} skipped: {what}")
        lines.append("  ".join(parts))
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


NAME_TASKS = "Name at least one task: --tasks hellaswag=FILE.jsonl or --tasks FILE.txt."


def measure_validation(
    model: LoadedModel, arguments: argparse.Namespace, world: World
) -> TaskResult:
    """Measure a model on the validation sequences of its run, as training does; all ranks call.

    Raises:
        RefocusedError: On every rank: the model is not from a run, the run has no validation set,
            the data cannot be read, or an option needs `--tasks`.
    """
    import torch

    from refocused.config.batch_plan import BatchPlan
    from refocused.config.load_run import read_run
    from refocused.data.loader.open_data import build_data
    from refocused.evaluate.export_copy import FOLDER
    from refocused.evaluate.multiple_choice import Measure, TaskResult
    from refocused.metrics.history import perplexity
    from refocused.models.causal_lm import CausalLM
    from refocused.train.step.evaluation import LossSums

    for option in ("context", "stride", "data"):
        if getattr(arguments, option) is not None:
            raise ConfigError(f"--{option} needs --tasks. Name tasks, or leave it out.")

    def run_file() -> Path:
        folder = model.source.parent if model.source.name == FOLDER else model.source
        if not (folder / "run.yaml").is_file():
            raise ConfigError(
                f"{model.source} is not from a local run, so it has no validation set. {NAME_TASKS}"
            )
        return folder / "run.yaml"

    config = world.on_all_ranks(lambda: read_run(run_file()))
    sequences = min(config.evaluation.sequences, arguments.limit or config.evaluation.sequences)
    micro_batch_size = config.batch.micro_batch_size
    data = build_data(
        config.data.model_copy(update={"disk_limit_gb": None}),  # trains nothing
        plan=BatchPlan(
            micro_batch_size=arguments.batch
            if micro_batch_size == "auto"
            else min(micro_batch_size, arguments.batch),
            gradient_accumulation_steps=1,
            world_size=world.world_size,
            sequence_length=config.model.sequence_length,
        ),
        world=world,
        vocabulary=model.network.config.vocab_size,
        seed=config.run.seed,
        steps=0,
        evaluation_sequences=sequences,
        open_source=lambda url: bucket_at(url, arguments),
    )
    network = CausalLM(
        model.network,
        chunk_tokens=config.model.head_chunk_tokens,
        document_id=config.data.document_id if config.data.mask_documents else None,
    )

    def sum_losses() -> LossSums:
        losses = LossSums()
        with torch.inference_mode():
            for batch in data.validation_batches():
                inputs, labels = batch.input_ids.to(world.device), batch.labels.to(world.device)
                losses.add(batch, network(inputs, labels))
        return losses

    began = time.monotonic()
    try:
        losses = world.on_all_ranks(sum_losses)
    finally:
        data.cache.close()
    loss = losses.mean(world)
    if loss is None:
        raise ConfigError(f"{model.source}: its run has no validation set. {NAME_TASKS}")
    measures = {"loss": loss.mean, "perplexity": perplexity(loss.mean)}
    measures |= {f"{source} loss": value for source, value in loss.by_source.items()}
    count = sum(len(source.validation.sequences) for source in data.sources)
    named = {name: Measure(value, None) for name, value in measures.items()}
    return TaskResult("validation", count, 0, named, seconds=time.monotonic() - began)
