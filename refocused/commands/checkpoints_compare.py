"""`checkpoints compare`: two steps side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from refocused.commands.arguments import Parser
from refocused.commands.run_selection import add_local_option, add_run_options, find_steps

if TYPE_CHECKING:
    from refocused.checkpoints.resume.comparison import Comparison, Difference, LossChange
    from refocused.checkpoints.resume.step_contents import StepContents


def add_compare_arguments(parser: Parser) -> None:
    """Describe the command line."""
    for name, which in (("a", "first"), ("b", "second")):
        text = f"the {which}: latest, best, a number, a name, or a path in another run"
        parser.add_argument(name, metavar=name.upper(), help=text)
    add_run_options(parser)
    add_local_option(parser)


def run_compare(arguments: argparse.Namespace) -> int:
    """Show how two steps differ."""
    from refocused.checkpoints.resume.comparison import compare
    from refocused.checkpoints.resume.step_contents import read_contents

    found = find_steps([arguments.a, arguments.b], arguments)
    a, b = (read_contents(step.catalog, step.entry) for step in found)
    comparison = compare(a, b)
    if arguments.json:
        print(json.dumps(_record(a, b, comparison), indent=1))
    else:
        _print(a, b, comparison)
    return max(step.outcome for step in found)


def _record(a: StepContents, b: StepContents, comparison: Comparison) -> dict[str, Any]:
    losses = [dataclasses.asdict(loss) | {"change": loss.change} for loss in comparison.losses]
    return {"a": a.where, "b": b.where, **dataclasses.asdict(comparison), "losses": losses}


def _print(a: StepContents, b: StepContents, comparison: Comparison) -> None:
    print(f"A  {a.where}\nB  {b.where}")
    _print_rows("losses", [_loss_row(loss) for loss in comparison.losses])
    _print_rows("facts that differ", [_row(fact) for fact in comparison.facts])
    _print_rows("settings that differ", [_row(setting) for setting in comparison.settings])


def _print_rows(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print a table of names, A and B below its title."""
    print(f"\n{title}" if rows else f"\n{title}: none")
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, first, second in rows:
        print(f"  {name:<{widths[0]}}   {first:<{widths[1]}}   {second}".rstrip())


def _loss_row(loss: LossChange) -> tuple[str, str, str]:
    a, b = ("unknown" if value is None else f"{value:.4f}" for value in (loss.a, loss.b))
    return loss.name, a, b if loss.change is None else f"{b}   {loss.change:+.4f}"


def _row(difference: Difference) -> tuple[str, str, str]:
    a = "-" if difference.only_in == "b" else _text(difference.a)
    b = "-" if difference.only_in == "a" else _text(difference.b)
    return difference.name, a, b


def _text(value: object) -> str:
    """Spell a value as a run file would."""
    if value is None:
        return "null"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.10g}" if isinstance(value, float) else str(value)
