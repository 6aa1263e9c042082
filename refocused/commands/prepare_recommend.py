"""`prepare_data recommend`: a model and a run that fit a data set."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser
from refocused.commands.places import add_credentials, place
from refocused.commands.quantities import count, count_text, positive
from refocused.commands.reading_options import add_reading_options, data_settings
from refocused.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from refocused.commands.recommendation import Recommendation
    from refocused.config.shape import ModelShape
    from refocused.estimate.run_cost import Machine


def add_recommend_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("source", nargs="?", metavar="DIR_OR_URL", help="folder or gs:// address of token files")
    add("--tokens", type=count, metavar="N", help="instead of a source")
    add("--preset", metavar="NAME", help="this model (default: the nearest to the data's size)")
    add(
        "--epochs", type=positive, metavar="E", help="passes (1; with --preset: 20 tokens a weight)"
    )
    add("--step-tokens", type=count, default=2**20, metavar="N", help="of a step (1048576)")
    add("--sequence-length", type=count, default=2048, metavar="N", help="(2048)")
    add("--gpus", type=count, default=8, metavar="N", help="(8)")
    add("--gpu", default="H100 SXM", metavar="NAME", help="(H100 SXM)")
    add("--mfu", type=positive, default=0.4, metavar="F", help="share of the peak (0.4)")
    add("--per-hour", type=positive, metavar="USD", help="price of the whole machine")
    add("--json", action="store_true", help="print JSON")
    add_reading_options(parser)
    add_credentials(parser)


def run_recommend(arguments: argparse.Namespace) -> int:
    """Count the tokens, and print a run."""
    from refocused.commands.recommendation import recommend

    if (arguments.source is None) == (arguments.tokens is None):
        raise ConfigError("Name either a source or --tokens N, one of the two.")
    machine = _machine(arguments)
    shapes = _shapes(arguments.preset)
    found = recommend(
        arguments.tokens or _tokens(arguments),
        shapes=shapes,
        preset=None if arguments.preset is None else next(iter(shapes)),
        epochs=arguments.epochs,
        step_tokens=arguments.step_tokens,
        sequence_length=arguments.sequence_length,
        machine=machine,
    )
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
    else:
        _print(found, arguments)
    return ExitCode.OK


def _tokens(arguments: argparse.Namespace) -> int:
    from refocused.shards.manifest import build_manifest

    data = data_settings(arguments, arguments.source)
    return build_manifest(place(arguments.source, arguments), data, cache_file=None).tokens


def _shapes(preset: str | None) -> dict[str, ModelShape]:
    from refocused.config.files import REPOSITORY_CONFIG, find_config
    from refocused.config.shape import load_shape

    if preset is not None:
        file = find_config("models", preset)
        return {file.stem: load_shape(file)}
    files = sorted((REPOSITORY_CONFIG / "models").glob("*.json"))
    return {file.stem: load_shape(file) for file in files}


def _machine(arguments: argparse.Namespace) -> Machine:
    from refocused.estimate.run_cost import Machine
    from refocused.hardware import gpu_facts, known_gpus

    facts = gpu_facts(arguments.gpu)
    if facts is None:
        raise ConfigError(
            f"--gpu {arguments.gpu!r}: nothing is known of it. Known are {', '.join(known_gpus())}."
        )
    return Machine(arguments.gpus, facts.bf16_flops, arguments.mfu, arguments.per_hour)


def _print(found: Recommendation, arguments: argparse.Namespace) -> None:
    cost = "price unknown: name it by --per-hour"
    if found.cost_usd is not None:
        cost = f"${found.cost_usd:,.2f} at ${arguments.per_hour:,.2f} an hour"
    speed = f"{count_text(found.tokens_per_second)} tokens/s"
    machine = f"{arguments.gpus} x {arguments.gpu} at {arguments.mfu:.0%} of the peak"
    fit = f"20 tokens a parameter would be {count_text(found.ideal_parameters)}"
    rows = [
        ("data", f"{found.data_tokens:,} tokens; {fit}"),
        ("model", f"{found.preset}, {found.parameters:,} parameters"),
        ("tokens", f"{found.tokens_per_parameter:.1f} a parameter, {found.epochs:.2f} epochs"),
        ("steps", f"{found.steps:,} of {found.step_tokens:,} tokens"),
        ("warm-up", f"{found.warmup_steps:,} steps"),
        ("save", f"every {found.save_interval:,} steps"),
        ("time", f"{found.hours:,.1f} h, {speed}: {machine}"),
        ("cost", cost),
    ]
    for name, value in rows:
        print(f"{name:<8} {value}")
    for note in found.notes:
        print(f"note: {note}")
    windows = found.step_tokens // arguments.sequence_length
    print(
        f"In the run file:\nrun:\n  steps: {found.steps}\nmodel:\n  preset: {found.preset}\n"
        f"  sequence_length: {arguments.sequence_length}\nbatch:\n  windows: {windows}\n"
        f"schedule:\n  warmup_steps: {found.warmup_steps}\n"
        f"checkpoint:\n  interval: {found.save_interval}"
    )
