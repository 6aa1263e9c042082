"""`evaluate spectrum`: how long the modes of a model without attention remember."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from refocused.commands.arguments import Parser
from refocused.commands.evaluate_compare import (
    check_picture,
    draw_picture,
    network_of,
    picture_record,
)
from refocused.commands.run_selection import add_run_options
from refocused.system.errors import ExitCode

ROW = "{:<32} {:>6} {:>28} {:>28}"


def run_spectrum(parser: Parser) -> int:
    """Print the shortest, median and longest horizon of every part, and draw them if asked."""
    parser.epilog = (
        "A mode's horizon is the tokens after which it has forgotten 63 % of what it saw; those of "
        "a scale of s tokens count its own."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="as for evaluate, or a name in config/models"
    )
    parser.add_argument(
        "--picture", "--out", type=Path, metavar="FILE.png", help="draw the horizons"
    )
    add_run_options(parser)
    arguments = parser.read()
    check_picture(arguments.picture)
    from refocused.evaluate.comparison import draw_spectrum, spectra

    modules = spectra(network_of(arguments.model, arguments, dtype="fp32"))
    parts: list[Mapping[str, float | str]] = [
        {"part": one.name, **one.summary()} for one in modules
    ]
    if arguments.json:
        print(json.dumps(picture_record(arguments) | {"parts": parts}, indent=1))
    else:
        print(ROW.format("PART", "MODES", "HORIZON IN TOKENS", "RADIANS A TOKEN").rstrip())
        for part in parts:
            print(_line(part))
    draw_picture(lambda file: draw_spectrum(modules, file, title=arguments.model), arguments)
    return ExitCode.OK


def _line(part: Mapping[str, float | str]) -> str:
    horizons = " ".join(
        f"{part[f'{name}_tokens']:,.1f}" for name in ("shortest", "median", "longest")
    )
    turns = " ".join(f"{part[f'{name}_frequency']:.2g}" for name in ("lowest", "median", "highest"))
    return ROW.format(part["part"], part["modes"], horizons, turns)
