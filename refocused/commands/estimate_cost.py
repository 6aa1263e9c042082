"""`launch/estimate_cost.py`: what a run will take, takes, or has taken, in hours and dollars."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from refocused.commands.arguments import Once, Parser, run_verb, split_overrides
from refocused.commands.output import count, positive
from refocused.system.errors import ConfigError, ExitCode, ShardError

if TYPE_CHECKING:
    from refocused.commands.run_estimate import Estimate


WHAT = "Estimate a run before it begins, or read off one that trains or has trained."
SWEPT = "gpus="
GPUS, GPU = 8, "H100 SXM"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    given = sys.argv[1:] if argv is None else argv
    return run_verb("estimate_cost", {"": ("estimate_cost", WHAT)}, given)


def add_estimate_cost_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("--config", action=Once, metavar="FILE", help="run file, or the name of one in config/runs")
    add(
        "--measured", metavar="RUN", help="instead: a run's folder or name; what it takes, measured"
    )
    add("--gpus", type=count, metavar="N", help=f"({GPUS})")
    add("--gpu", metavar="NAME", help=f"({GPU})")
    add(
        "--per-hour",
        type=positive,
        metavar="USD",
        help="price of the whole machine (default: cost.per_hour_usd of the run)",
    )
    add(
        "--budget",
        type=positive,
        metavar="USD",
        help="say how far it reaches (default: cost.budget_usd of the run)",
    )
    add("--sweep", metavar="gpus=1,2,4,8", help="the same run on these numbers of GPUs")
    add("--json", action="store_true", help="print JSON")
    add("overrides", nargs="*", metavar="section.key=value")


def run_estimate_cost(arguments: argparse.Namespace) -> int:
    """Estimate or measure, and print."""
    if (arguments.config is None) == (arguments.measured is None):
        raise ConfigError("Name either --config FILE or --measured RUN, one of the two.")
    if arguments.measured is not None:
        return _measure(arguments)
    from refocused.commands.estimate_text import estimate_lines
    from refocused.commands.run_estimate import estimate
    from refocused.config.load_run import load_run
    from refocused.config.prices import read_prices
    from refocused.data.manifest.vocabulary import decide_vocabulary

    loaded = load_run(arguments.config, split_overrides(arguments.overrides))
    try:
        loaded = decide_vocabulary(loaded)
    except ShardError as error:
        known = f"{loaded.shape.vocabulary:,} token ids of {loaded.config.model.preset}"
        print(f"{error} The estimate takes the {known}.", file=sys.stderr)
    found = estimate(
        loaded,
        gpus=arguments.gpus or GPUS,
        gpu=arguments.gpu or GPU,
        per_hour_usd=arguments.per_hour or loaded.config.cost.per_hour_usd,
        budget_usd=arguments.budget or loaded.config.cost.budget_usd,
        sweep=_sweep(arguments.sweep),
        prices=read_prices(),
    )
    fix = _remedy(found)
    lines = [*estimate_lines(found), *([] if fix is None else ["", fix])]
    _print({**found.as_record(), "fix": fix}, lines, as_json=arguments.json)
    return ExitCode.OK if fix is None else ExitCode.CHECK_FAILED


def _remedy(found: Estimate) -> str | None:
    """Return what makes a run fit its GPUs' memory; None: it fits as it is."""
    from refocused.doctor.run_fits import fitting_on_gpus

    main = found.main
    if main.fits or main.choice is None:
        return None
    fix = fitting_on_gpus(
        found.loaded, main.choice, ranks=main.gpus, memory_bytes=found.gpu.memory_gib * 2**30
    )
    return f"A step does not fit into a GPU's memory. {fix}"


def _measure(arguments: argparse.Namespace) -> int:
    import time

    from refocused.commands.estimate_text import measured_lines
    from refocused.commands.run_measured import measure
    from refocused.commands.run_selection import find_run

    if arguments.overrides or arguments.sweep or arguments.gpus or arguments.gpu:
        raise ConfigError(
            "--measured reads a run as it is: no settings, --gpus, --gpu or --sweep go with it."
        )
    found = measure(
        find_run(arguments.measured, option="--measured"),
        per_hour_usd=arguments.per_hour,
        budget_usd=arguments.budget,
        now=time.time(),
    )
    _print(found.as_record(), measured_lines(found), as_json=arguments.json)
    return ExitCode.OK


def _sweep(text: str | None) -> list[int]:
    """Read `gpus=1,2,4,8`.

    Raises:
        ConfigError: It is something else.
    """
    if text is None:
        return []
    if not re.fullmatch(rf"{SWEPT}[1-9][0-9]*(,[1-9][0-9]*)*", text):
        raise ConfigError(f"--sweep {text}: numbers of GPUs are wanted, as gpus=1,2,4,8.")
    return [int(number) for number in text.removeprefix(SWEPT).split(",")]


def _print(record: dict[str, object], lines: Sequence[str], *, as_json: bool) -> None:
    print(json.dumps(record, indent=1, default=str) if as_json else "\n".join(lines))
