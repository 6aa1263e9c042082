"""`checkpoints export`: a step as a folder that transformers load."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

from refocused.commands.arguments import Parser
from refocused.commands.local_steps import local_step
from refocused.commands.output import duration_text, size_text
from refocused.commands.run_selection import add_local_option, add_run_options
from refocused.system.errors import ConfigError, ExitCode


def add_export_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("step", metavar="STEP", help="latest, best, a number, a name, a path or a gs:// address")
    add("out", metavar="OUT", type=Path, help="the folder to make")
    add("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the weights (bf16)")
    add(
        "--tokenizer",
        metavar="NAME",
        help="bytes, gpt2, hub:MODEL or a tokenizer.json (default: its own)",
    )
    add("--bpe-folder", type=Path, metavar="DIR", help="vocab.bpe and encoder.json, for gpt2")
    add("--no-tokenizer", action="store_true", help="export the model alone")
    add(
        "--no-compare",
        action="store_true",
        help="do not load the result to compare it, which takes the memory of the whole model",
    )
    add_run_options(parser)
    add_local_option(parser)


def run_export(arguments: argparse.Namespace) -> int:
    """Export one step.

    Raises:
        ConfigError: The folder exists; known before torch is imported and a step is verified.
    """
    if arguments.out.expanduser().exists():
        raise ConfigError(f"{arguments.out} exists already. Remove it, or name another folder.")
    from refocused.evaluate.export import export_step
    from refocused.evaluate.model_weights import open_model_weights, tokenizer_of
    from refocused.tokenizers.encoders import TokenizerChoice

    named = arguments.tokenizer
    choice = None if named is None else TokenizerChoice(named, bpe_folder=arguments.bpe_folder)
    started = time.monotonic()
    step = local_step(arguments.step, arguments)
    _say(f"verifying {step.path}")
    weights = open_model_weights(step)
    exported = export_step(
        weights,
        arguments.out.expanduser(),
        tokenizer=None if arguments.no_tokenizer else tokenizer_of(weights, choice),
        dtype=arguments.dtype,
        compare=not arguments.no_compare,
        say=_say,
    )
    seconds = time.monotonic() - started
    if arguments.json:
        found = dataclasses.asdict(exported) | {"folder": str(exported.folder)}
        print(json.dumps({"step": step.step, **found, "seconds": seconds}, indent=1))
        return ExitCode.OK
    size = f"{exported.parameters:,} parameters, {size_text(exported.bytes)}"
    print(f"{exported.folder}: step {step.step:,}, {size}, in {duration_text(seconds)}")
    if exported.logit_difference is not None:
        share = f"{exported.logit_difference:.0e}"
        print(f"transformers loads the same weights; logits agree to {share} of the largest")
    return ExitCode.OK


def _say(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr)
