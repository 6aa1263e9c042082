"""What commands that put tasks to models have in common: options, ranks, lines."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser
from refocused.commands.output import count, duration_text
from refocused.system.errors import ConfigError

if TYPE_CHECKING:
    from refocused.config.optimization import Dtype
    from refocused.evaluate.multiple_choice import Measure
    from refocused.evaluate.score_model import Settings, TimedResult
    from refocused.evaluate.tasks import TaskFile
    from refocused.system.world import World
    from refocused.tokenizers.encoders import TokenizerChoice

TASKS_HELP = (
    "hellaswag, piqa, arc_easy, arc_challenge, lambada, multiple_choice or perplexity, in --data "
    "or as NAME=FILE; a .jsonl (ctx, endings, label; query, choices, gold; or context, "
    "continuation); a .txt for perplexity; several with commas"
)


def add_task_options(parser: Parser) -> None:
    """Add what says which tasks, and how they are put."""
    add = parser.add_argument
    add("--tasks", metavar="NAMES", help=TASKS_HELP)
    add("--data", type=Path, metavar="DIR", help="folder of the tasks' files")
    add("--limit", type=count, metavar="N", help="the first N items, or windows of a text, alone")
    add("--batch", type=count, default=16, metavar="N", help="endings or windows at once (16)")
    add(
        "--context",
        type=count,
        metavar="N",
        help="tokens that the model sees at once (default: those it was trained on)",
    )
    add(
        "--stride",
        type=count,
        metavar="N",
        help="new tokens of each window of a text (default: the whole context)",
    )
    add(
        "--tokenizer",
        metavar="NAME",
        help="bytes, gpt2, hub:MODEL or a tokenizer.json (default: the model's)",
    )
    add("--bpe-folder", type=Path, metavar="DIR", help="vocab.bpe and encoder.json, for gpt2")


def add_machine_options(parser: Parser) -> None:
    """Add what says where a model computes, and in what."""
    add = parser.add_argument
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: auto)")
    add(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="(default: bf16 on GPUs that have it, fp16 on others, fp32 on CPUs)",
    )
    add("--local-rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher says it


def tasks_of(arguments: argparse.Namespace) -> list[TaskFile]:
    """Find the tasks that the command line names; none without `--tasks`.

    Raises:
        ConfigError: `--tasks` names none, or an unknown one, or a file is not there.
    """
    from refocused.evaluate.tasks import find_tasks

    if arguments.tasks is None:
        return []
    named = [name.strip() for name in arguments.tasks.split(",")]
    requests = [name for name in named if name]
    if not requests:
        raise ConfigError("--tasks: name at least one, as hellaswag=FILE.jsonl or a FILE.txt.")
    return find_tasks(requests, data=arguments.data)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return how the command line wants tasks to be put."""
    from refocused.evaluate.score_model import Settings

    return Settings(
        limit=arguments.limit,
        batch=arguments.batch,
        context_tokens=arguments.context,
        stride=arguments.stride,
    )


def tokenizer_choice(arguments: argparse.Namespace) -> TokenizerChoice | None:
    """Return the tokenizer that the command line names; None: the model's own."""
    from refocused.tokenizers.encoders import TokenizerChoice

    if arguments.tokenizer is None:
        return None
    return TokenizerChoice(arguments.tokenizer, bpe_folder=arguments.bpe_folder)


def ranks(device: str) -> World:
    """Join the ranks that a launcher started; without one, be the only rank.

    Raises:
        ConfigError: GPUs are wanted that are not there.
    """
    import torch

    from refocused.system.world import World, choose_device, join_world

    if os.environ.get("WORLD_SIZE", "1") != "1":
        return join_world(device)
    kind = choose_device(device, local_world_size=1, gpus=torch.cuda.device_count())
    return World(device_kind=kind)


def dtype_of(arguments: argparse.Namespace, world: World) -> Dtype:
    """Return what the model computes in."""
    return arguments.dtype or usual_dtype(str(world.device))


def usual_dtype(device: str) -> Dtype:
    """Return what a model computes in where no option says it: fp32 on CPUs."""
    import torch

    from refocused.estimate.precision import native_dtype

    if not device.startswith("cuda"):
        return "fp32"
    return native_dtype(capability=torch.cuda.get_device_capability(device)).dtype


class BatchLine:
    """How far a task is, as one line that moves on a terminal, and nothing elsewhere."""

    def __init__(self, *, speaks: bool) -> None:
        """Show on standard error, on the rank that speaks."""
        self._speaks = speaks and sys.stderr.isatty()

    def show(self, task: str, done: int, total: int) -> None:
        """Show the batches done; the last one takes the line away."""
        if not self._speaks:
            return
        text = f"{task} {done:,}/{total:,}"
        sys.stderr.write(f"\r{text}" if done < total else f"\r{' ' * len(text)}\r")
        sys.stderr.flush()


def result_line(timed: TimedResult, *, width: int) -> str:
    """Write a task's result for a person."""
    result = timed.result
    parts = [f"{name} {measure_text(one)}" for name, one in result.measures.items()]
    rate = f"{timed.items_per_second:,.1f}/s"
    line = [f"{result.task:<{width}}", f"{result.items:>6,} items", *parts]
    line.append(f"{duration_text(timed.seconds)} ({rate})")
    if result.cut:
        line.append(f"{result.cut:,} contexts cut from the left")
    if result.skipped:
        line.append(f"{result.skipped:,} skipped: an ending is longer than the context")
    return "  ".join(line)


def measure_text(measure: Measure) -> str:
    """Write a number with its standard error."""
    if measure.standard_error is None:
        return f"{measure.value:.4f}"
    return f"{measure.value:.4f} +- {measure.standard_error:.4f}"
