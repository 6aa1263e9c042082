"""`generate`: continue prompts with a checkpoint, a run or a model folder."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import (
    Parser,
    add_tokenizer_options,
    chosen,
    option_errors,
    tokenizer_choice,
)
from refocused.commands.checkpoints.show import print_entries
from refocused.commands.evaluate import add_dtype_option
from refocused.commands.output import count, print_result
from refocused.commands.run_selection import add_run_options, list_steps, model_source, run_choice
from refocused.system.errors import CheckpointError, ConfigError
from refocused.system.logs import print_message

if TYPE_CHECKING:
    from refocused.evaluate.generation import Generated, Sampling
    from refocused.evaluate.load_model import LoadedModel


def run_generate(parser: Parser) -> None:
    """Continue prompts, or what is typed."""
    parser.examples = (
        "best --run demo",
        "latest 'def main(' --tokens 200 --temperature 0.7 -n 3",
        "best --lines prompts.txt --json",
    )
    kinds = (
        "latest, best, a step, a path, a gs:// address, a run, or a transformers folder (default: "
        "choose from a list)"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=kinds)
    typed = "text to continue (default: read from the terminal or standard input)"
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help=typed)
    add = parser.group("input")
    add("--file FILE", "one prompt: the whole file", type=Path)
    add("--lines FILE", "one prompt per line", type=Path)
    add = parser.group("sampling")
    add("--tokens --max-tokens N", "maximum number of new tokens", type=count, default=100)
    add("--temperature T", "0: always the most likely token", type=float, default=0.8)
    add("--top-k N", "sample from the N most likely tokens; 0: from all", type=int, default=40)
    add("--top-p P", "sample from the most likely that sum to P", type=float, default=1.0)
    add("--min-p P", "drop those below P times the most likely", type=float, default=0.0)
    add("--repetition-penalty R", "above 1: repeat less", type=float, default=1.0)
    add("--seed N", "seed of the sampling", type=int, default=0)
    add("-n --samples --n N", "texts per prompt", type=count, default=1)
    add("--stop TEXT", "end a text before TEXT; repeatable", action="append", default=[])
    add = parser.group("compute")
    add("--batch N", "texts generated at once", type=count, default=8)
    add("--device NAME", "cpu, cuda, cuda:1 ... (default: cuda if there is a GPU, else cpu)")
    add_dtype_option(parser)
    add_tokenizer_options(parser)
    add_run_options(parser)
    arguments = parser.read()
    if arguments.temperature == 0:  # the most likely token is always taken
        of_chance = ("top_k", "top_p", "min_p", "seed")
        parser.refuse(arguments, "has no effect with --temperature 0", *of_chance)
    from refocused.evaluate.generation import Sampling, generate
    from refocused.evaluate.load_model import model_for_inference

    prompts = _prompts(arguments)
    with option_errors(stops="stop"):
        sampling = chosen(Sampling, arguments, stops=tuple(arguments.stop))
    if prompts is None and arguments.json:
        raise ConfigError("--json needs a prompt.")
    if arguments.model is None:
        arguments.model = _picked_step(arguments)
    source = model_source(arguments.model, run_choice(arguments))
    if sys.stderr.isatty():
        print_message(None, f"loading {source}")
    model = model_for_inference(
        source,
        device=arguments.device,
        dtype=arguments.dtype,
        tokenizer=tokenizer_choice(arguments),
    )
    if prompts is None:
        _converse(model, sampling)
    elif arguments.json:
        generated = generate(model, prompts, sampling, batch=arguments.batch)
        answers = [
            dataclasses.asdict(answer) | {"prompt": prompts[answer.prompt]}
            for answer in generated.answers
        ]
        names = ("tokens", "seconds", "first_seconds", "tokens_per_second")
        record = {
            "model": str(model.source),
            "facts": dict(model.facts),
            "sampling": dataclasses.asdict(sampling),
            "answers": answers,
            **{name: getattr(generated, name) for name in names},
        }
        print_result(record, [], as_json=True)
        _warn_of_length(model, generated)
    else:
        if len(prompts) * sampling.samples == 1:
            _show(prompts[0])
        _continue(model, prompts, sampling, batch=arguments.batch)


def _prompts(arguments: argparse.Namespace) -> list[str] | None:
    """Return the given prompts; None: they will be typed."""
    prompts = list(arguments.prompts)
    if arguments.file is not None:
        prompts.append(_text(arguments.file.read_bytes, arguments.file))
    if arguments.lines is not None:
        text = _text(arguments.lines.read_bytes, arguments.lines)
        lines = [line for line in text.splitlines() if line]
        if not lines:
            raise ConfigError(f"{arguments.lines} has no prompt. Write one on each line.")
        prompts += lines
    if not prompts and not sys.stdin.isatty():
        prompts.append(_text(sys.stdin.buffer.read, "standard input"))
    if "" in prompts:
        raise ConfigError("A prompt is empty. Give it some text.")
    return prompts or None


def _text(read: Callable[[], bytes], where: Path | str) -> str:
    try:
        return read().decode().removesuffix("\n")
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}. Name a readable file.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: byte {error.start:,} is not UTF-8 ({error.object[error.start]:#04x}). "
            "Convert the text, for example: iconv -f latin1 -t utf-8"
        ) from None


def _picked_step(arguments: argparse.Namespace) -> str:
    """List the run's checkpoints and return the one that the user names."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(
            "Name a checkpoint: latest, best, a step, a path, a gs:// address, or a model folder."
        )
    listing = list_steps(run_choice(arguments))
    if not listing.entries:
        raise CheckpointError(f"{listing.run} has no checkpoint. Name another run: --run NAME")
    arguments.run = str(listing.run)
    print(f"run {listing.run}", file=sys.stderr)
    print_entries(listing.entries, file=sys.stderr)
    while True:
        # On standard error: standard output is for the text.
        print("Which checkpoint? [latest] ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise ConfigError("No checkpoint was chosen.")
        request = line.strip().replace(",", "") or "latest"
        try:
            listing.catalog.find(request, listing.entries)
        except CheckpointError as error:
            print_message("error", str(error))
            continue
        return request


def _converse(model: LoadedModel, sampling: Sampling) -> None:
    """Continue typed prompts; Ctrl+C ends a text, Ctrl+D the command."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - editing and history for `input`
    for turn in itertools.count():
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        drawn = dataclasses.replace(sampling, seed=sampling.seed + turn)
        try:
            if prompt:
                _continue(model, [prompt], drawn, batch=sampling.samples)
        except ConfigError as error:
            print_message("error", str(error))
        except KeyboardInterrupt:
            print()


def _continue(
    model: LoadedModel, prompts: Sequence[str], sampling: Sampling, *, batch: int
) -> None:
    """Print the texts, a single one while it is generated, and the speed."""
    from refocused.evaluate.generation import generate

    generated = generate(model, prompts, sampling, batch=batch, show=_show)
    if len(generated.answers) == 1:
        print()
        ended = f", ended by: {generated.answers[0].ended}"
    else:
        for number, answer in enumerate(generated.answers, 1):
            print(f"--- {number} ({answer.ended}, {answer.tokens} tokens)")
            print(prompts[answer.prompt] + answer.text)
        ended = ""
    print(
        f"[{generated.tokens:,} tokens in {generated.seconds:.2f} s, "
        f"{generated.tokens_per_second:,.1f} tokens/s, first after "
        f"{generated.first_seconds:.2f} s{ended}]",
        file=sys.stderr,
    )
    _warn_of_length(model, generated)


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _warn_of_length(model: LoadedModel, generated: Generated) -> None:
    if (line := model.beyond_training(generated.longest)) is not None:
        print_message("warning", line)
