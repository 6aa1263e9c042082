"""`launch/generate.py`: generate text from a checkpoint, a run or a model folder."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser, quiet_on_a_closed_pipe
from refocused.commands.checkpoints.show import print_entries
from refocused.commands.output import count
from refocused.commands.run_selection import add_run_options, list_steps, model_source
from refocused.system.errors import CheckpointError, ConfigError, ExitCode, RefocusedError

if TYPE_CHECKING:
    from refocused.evaluate.generation import Answer, Generated, Sampling
    from refocused.evaluate.load_model import LoadedModel


def pick_step(arguments: argparse.Namespace) -> str:
    """Show the steps of the run, here and in the bucket; return the request that was typed.

    Args:
        arguments: With the options of `add_run_options`, and perhaps `--local`.

    Raises:
        ConfigError: Nobody is at a terminal who could pick, or there is no such run.
        CheckpointError: The run has no step.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(
            "No checkpoint is named. Give latest, best, a step, a path, a gs:// address, or the "
            "folder of a model."
        )
    listing = list_steps(arguments)
    if not listing.entries:
        raise CheckpointError(f"{listing.run} has no checkpoint. Name another run: --run NAME")
    arguments.run = str(listing.run)
    print(f"run {listing.run}", file=sys.stderr)
    print_entries(listing.entries, file=sys.stderr)
    while True:
        request = _asked("Which step? [latest] ") or "latest"
        try:
            listing.catalog.find(request, listing.entries)
        except CheckpointError as error:
            print(error, file=sys.stderr)
            continue
        return request


def _asked(question: str) -> str:
    """Ask on standard error, so that standard output holds only what is written."""
    print(question, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise ConfigError("No step was picked.")
    return line.strip().replace(",", "")


def build_parser() -> Parser:
    """Describe the command line."""
    parser = Parser(
        prog="generate",
        description="Continue prompts with a model. Without a prompt, lines are read: at a "
        "terminal one after another, otherwise as one text.",
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="latest, best, a step, a path, a gs:// address, a run, or a transformers folder "
        "(default: a list to pick from)",
    )
    add("prompts", nargs="*", metavar="PROMPT", help="text to continue")
    add("--file", type=Path, metavar="FILE", help="a prompt: the whole file")
    add("--lines", type=Path, metavar="FILE", help="a prompt in every line")
    add(
        *("--tokens", "--max-tokens"),
        type=count,
        default=100,
        metavar="N",
        help="most tokens to write (100)",
    )
    add("--temperature", type=float, default=0.8, help="0: the likeliest token always (0.8)")
    add("--top-k", type=int, default=40, metavar="N", help="of the N likeliest; 0: of all (40)")
    add("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest that sum to P")
    add("--min-p", type=float, default=0.0, metavar="P", help="of those above P of the likeliest")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: repeat less")
    add("--seed", type=int, default=0, help="of the draws (0)")
    add("-n", "--samples", "--n", type=count, default=1, metavar="N", help="texts a prompt (1)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before it; repeatable")
    add("--batch", type=count, default=8, metavar="N", help="texts written at once (8)")
    add("--device", help="cpu, cuda, cuda:1 ... (default: cuda where there is one)")
    add(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="(default: bf16 on GPUs that have it, fp16 on others, fp32 on CPUs)",
    )
    add(
        "--tokenizer",
        metavar="NAME",
        help="bytes, gpt2, hub:MODEL or a tokenizer.json (default: its own)",
    )
    add("--bpe-folder", type=Path, metavar="DIR", help="vocab.bpe and encoder.json, for gpt2")
    add_run_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = build_parser().read(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        with quiet_on_a_closed_pipe():
            return _run(arguments)
    except RefocusedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    prompts = _prompts(arguments)
    sampling = _sampling(arguments)
    if prompts is None and arguments.json:
        raise ConfigError("--json needs a prompt.")
    if arguments.model is None:
        arguments.model = pick_step(arguments)
    model = _load(arguments)
    if prompts is None:
        _converse(model, sampling)
        return ExitCode.OK
    from refocused.evaluate.generation import generate

    is_single = len(prompts) * sampling.samples == 1 and not arguments.json
    if is_single:
        _show(prompts[0])
    found = generate(
        model, prompts, sampling, batch=arguments.batch, show=_show if is_single else None
    )
    if arguments.json:
        print(json.dumps(_record(model, prompts, sampling, found), indent=1))
    else:
        _print_answers(prompts, found, is_single=is_single)
    _warn_of_length(model, found)
    return ExitCode.OK


def _prompts(arguments: argparse.Namespace) -> list[str] | None:
    """Return all prompts that were given; None: a person will type them.

    Raises:
        ConfigError: A file cannot be read, or has none.
    """
    prompts = list(arguments.prompts)
    if arguments.file is not None:
        prompts.append(_text(arguments.file).removesuffix("\n"))
    if arguments.lines is not None:
        lines = [line for line in _text(arguments.lines).splitlines() if line]
        if not lines:
            raise ConfigError(f"{arguments.lines}: there is no prompt in it. Write one in a line.")
        prompts += lines
    if not prompts and not sys.stdin.isatty():
        prompts.append(_decoded(sys.stdin.buffer.read(), "standard input").removesuffix("\n"))
    if "" in prompts:
        raise ConfigError("A prompt is empty. Write something that can be continued.")
    return prompts or None


def _text(file: Path) -> str:
    try:
        content = file.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}. Name a file that can be read.") from None
    return _decoded(content, str(file))


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: byte {error.start:,} is no UTF-8 ({content[error.start]:#04x}). "
            "Convert it, for example: iconv -f latin1 -t utf-8"
        ) from None


def _sampling(arguments: argparse.Namespace) -> Sampling:
    from refocused.evaluate.generation import Sampling

    return Sampling(
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        samples=arguments.samples,
        stops=tuple(arguments.stop),
    )


def _load(arguments: argparse.Namespace) -> LoadedModel:
    import torch

    from refocused.commands.evaluation_options import usual_dtype
    from refocused.evaluate.load_model import load_model
    from refocused.tokenizers.encoders import TokenizerChoice

    source = model_source(arguments.model, arguments)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    _require(device)
    named = arguments.tokenizer
    if sys.stderr.isatty():
        print(f"loading {source}", file=sys.stderr)
    return load_model(
        source,
        dtype=arguments.dtype or usual_dtype(device),
        device=device,
        tokenizer=None if named is None else TokenizerChoice(named, arguments.bpe_folder),
    )


def _require(device: str) -> None:
    """Refuse a device that is not there, before a model is read for it."""
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--device {device}: {reason}. Name cpu, cuda or cuda:N.") from None


def _converse(model: LoadedModel, sampling: Sampling) -> None:
    """Continue what is typed, line by line; Ctrl+C ends a text, Ctrl+D all."""
    from refocused.evaluate.generation import generate

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - makes `input` edit and remember lines
    for turn in itertools.count():
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        if not prompt:
            continue
        try:
            show = _show if sampling.samples == 1 else None
            drawn = dataclasses.replace(sampling, seed=sampling.seed + turn)
            found = generate(model, [prompt], drawn, batch=sampling.samples, show=show)
            _print_answers([prompt], found, is_single=sampling.samples == 1)
            _warn_of_length(model, found)
        except ConfigError as error:
            print(error, file=sys.stderr)
        except KeyboardInterrupt:
            print()


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _print_answers(prompts: Sequence[str], found: Generated, *, is_single: bool) -> None:
    """Print the texts, unless the single one was shown while it was written, and the pace."""
    if is_single:
        print()
    else:
        for number, answer in enumerate(found.answers, 1):
            print(f"--- {number} ({answer.ended}, {answer.tokens} tokens)")
            print(prompts[answer.prompt] + answer.text)
    print(pace_line(found), file=sys.stderr)


def _warn_of_length(model: LoadedModel, found: Generated) -> None:
    """Say on standard error when a text went beyond what the model was trained on."""
    line = model.beyond_training(found.longest)
    if line is not None:
        print(line, file=sys.stderr)


def pace_line(found: Generated) -> str:
    """Say how fast it was, and why a single text ended."""
    ended = f", ended by: {found.answers[0].ended}" if len(found.answers) == 1 else ""
    return (
        f"[{found.tokens:,} tokens in {found.seconds:.2f} s, {found.tokens_per_second:,.1f} "
        f"tokens/s, first after {found.first_seconds:.2f} s{ended}]"
    )


def _record(
    model: LoadedModel, prompts: Sequence[str], sampling: Sampling, found: Generated
) -> dict[str, Any]:
    def as_record(answer: Answer) -> dict[str, Any]:
        return dataclasses.asdict(answer) | {"prompt": prompts[answer.prompt]}

    return {
        "model": str(model.source),
        "facts": dict(model.facts),
        "sampling": dataclasses.asdict(sampling),
        "answers": [as_record(answer) for answer in found.answers],
        "tokens": found.tokens,
        "seconds": found.seconds,
        "first_seconds": found.first_seconds,
        "tokens_per_second": found.tokens_per_second,
    }
