"""`checkpoints plot`: the losses of a run as a picture."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from refocused.commands.arguments import Parser
from refocused.commands.run_selection import find_run
from refocused.system.errors import ConfigError, ExitCode, RefocusedError

if TYPE_CHECKING:
    from refocused.metrics.history import LossHistory, LossPoint


def add_plot_arguments(parser: Parser) -> None:
    """Describe the command line."""
    add = parser.add_argument
    add("--run", help="a run's folder or name (default: the newest below runs/)")
    add("--out", type=Path, metavar="FILE.png", help="the picture (default: loss.png in the run)")
    add("--json", action="store_true", help="print the losses as JSON too")


def run_plot(arguments: argparse.Namespace) -> int:
    """Draw the losses, and say the last and the best."""
    from refocused.monitor.screen.pictures import draw_history

    run = find_run(arguments.run)
    out = arguments.out or run / "loss.png"
    if out.suffix.lower() != ".png":
        raise ConfigError(f"--out {out}: the picture is a PNG. Give it a name that ends in .png.")
    history = _history(run)
    try:
        draw_history(history, out, title=run.absolute().name)
    except OSError as error:
        raise RefocusedError(
            f"{out} cannot be written ({error.strerror}). Name another file with --out."
        ) from error
    if arguments.json:
        best = history.best and dataclasses.asdict(history.best)
        content = {"file": str(out), **dataclasses.asdict(history), "best": best}
        print(json.dumps(content, indent=1))
        return ExitCode.OK
    print(f"{out}: {len(history.training)} steps, {len(history.validation)} validations")
    for what, point in (
        ("last training", history.training[-1] if history.training else None),
        ("last validation", history.validation[-1] if history.validation else None),
        ("best validation", history.best),
    ):
        if point is not None:
            print(f"  {what:<15} {_point(point)}")
    return ExitCode.OK


def _history(run: Path) -> LossHistory:
    from refocused.metrics.history import METRICS_FILE, read_history

    file = run / METRICS_FILE
    try:
        history = read_history(file)
    except OSError as error:
        raise RefocusedError(
            f"{file} cannot be read ({error.strerror}). A run writes it where it trains; name its "
            "folder with --run."
        ) from error
    if not (history.training or history.validation):
        raise RefocusedError(
            f"{file} holds no step yet. Draw it once the run has logged one (log.interval)."
        )
    return history


def _point(point: LossPoint) -> str:
    loss = "not finite" if point.loss is None else f"{point.loss:.4f}"
    return f"{loss} at step {point.step:,}"
