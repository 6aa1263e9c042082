"""Letting a person at a terminal pick one of a run's steps."""

from __future__ import annotations

import argparse
import sys

from refocused.commands.checkpoints_inspect import table_lines
from refocused.commands.run_selection import catalog_of, listed, run_of
from refocused.system.errors import CheckpointError, ConfigError


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
    run = run_of(arguments)
    catalog = catalog_of(run, arguments)
    entries = listed(catalog, arguments).entries
    if not entries:
        raise CheckpointError(f"{run} has no checkpoint. Name another run: --run NAME")
    arguments.run = str(run)
    print("\n".join([f"run {run}", *table_lines(entries)]), file=sys.stderr)
    while True:
        request = _asked("Which step? [latest] ") or "latest"
        try:
            catalog.find(request, entries)
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
